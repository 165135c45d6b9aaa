"""The JSON Schema of a recipe, for editors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from finetune.config.schema import Recipe
from finetune.config.train_section import train_section

__all__ = ["recipe_schema"]


def recipe_schema() -> dict[str, Any]:
    """Returns the schema of a recipe file: its sections, and every method and scorer with its keys."""
    from finetune.data_selection import discover as discover_scorers
    from finetune.methods import discover

    schema = Recipe.model_json_schema(mode="validation")
    definitions = schema["$defs"]
    definitions["TrainSection"] = _own(train_section(), definitions)
    methods = discover()
    for name in methods:
        definitions[f"method.{name}"] = _named(name, methods.get(name).Config, definitions)
    names = {"enum": list(methods), "type": "string"}
    one = {"anyOf": [names, *({"$ref": f"#/$defs/method.{name}"} for name in methods)]}
    help_text = Recipe.model_fields["method"].description
    schema["properties"]["method"] = {"anyOf": [one, {"type": "array", "items": one}], "description": help_text}
    scorers = discover_scorers()
    for name in scorers:
        definitions[f"scorer.{name}"] = _named(name, scorers.get(name).Config, definitions)
    definitions["SelectSection"]["properties"]["scorer"]["anyOf"] = [
        {"enum": list(scorers), "type": "string"},
        *({"$ref": f"#/$defs/scorer.{name}"} for name in scorers),
    ]
    schema["properties"]["train"] = {"$ref": "#/$defs/TrainSection"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _named(name: str, config: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a registry entry's section: its name and its own keys."""
    entry = _own(config, definitions)
    entry["properties"] = {"name": {"const": name}, **entry.get("properties", {})}
    entry["required"] = ["name", *entry.get("required", [])]
    return entry


def _own(model: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of ``model``; what it refers to goes to ``definitions``."""
    schema = model.model_json_schema(mode="validation")
    definitions.update(schema.pop("$defs", {}))
    return schema
