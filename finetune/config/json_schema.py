"""The JSON Schema of a recipe, for editors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from finetune.config.schema import Recipe
from finetune.config.train_section import train_section

__all__ = ["recipe_schema"]


def recipe_schema() -> dict[str, Any]:
    """Returns the schema of a recipe file: all sections, all training arguments, every method with its keys."""
    from finetune.methods import discover

    schema = Recipe.model_json_schema(mode="validation")
    definitions = schema["$defs"]
    definitions["TrainSection"] = _own(train_section(), definitions)
    methods = discover()
    for name in methods:
        entry = _own(methods.get(name).Config, definitions)
        entry["properties"] = {"name": {"const": name}, **entry.get("properties", {})}
        entry["required"] = ["name", *entry.get("required", [])]
        definitions[f"method.{name}"] = entry
    names = {"enum": list(methods), "type": "string"}
    one = {"anyOf": [names, *({"$ref": f"#/$defs/method.{name}"} for name in methods)]}
    help_text = Recipe.model_fields["method"].description
    schema["properties"]["method"] = {"anyOf": [one, {"type": "array", "items": one}], "description": help_text}
    schema["properties"]["train"] = {"$ref": "#/$defs/TrainSection"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _own(model: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of ``model``; what it refers to goes to ``definitions``."""
    schema = model.model_json_schema(mode="validation")
    definitions.update(schema.pop("$defs", {}))
    return schema
