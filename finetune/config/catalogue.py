"""Every key that a recipe may have, with its meaning, its type and its default."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from finetune.config.schema import Recipe, Source
from finetune.config.train_section import train_section
from finetune.core.source_fields import REQUIRED

__all__ = ["Key", "describe_fields", "known_keys"]


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: Dotted key.
        type: What values it takes, in words.
        default: The default, or :data:`finetune.core.source_fields.REQUIRED`.
        help: What it means.
    """

    name: str
    type: str
    default: Any
    help: str


def known_keys(methods: Iterable[type[BaseModel]] = (), scorers: Iterable[type[BaseModel]] = ()) -> dict[str, Key]:
    """Returns the keys of a recipe by their dotted names.

    Args:
        methods: Configs of the methods that the recipe names: they give the keys of the method section.
        scorers: Configs of the scorers that it names: they give the keys of ``select.scorer``.
    """
    keys = [*describe_fields(Recipe, ""), *describe_fields(train_section(), "train.")]
    keys += [Key("method.name", "text", REQUIRED, "Registry name: `finetune ls methods`.")]
    for config in methods:
        keys += describe_fields(config, "method.")
    keys += [Key("select.scorer.name", "text", REQUIRED, "Registry name: `finetune ls selectors`.")]
    for config in scorers:
        keys += describe_fields(config, "select.scorer.")
    for section in ("data.train.", "data.eval."):
        keys += describe_fields(Source, section)
    return {key.name: key for key in keys}


def describe_fields(model: type[BaseModel], prefix: str) -> list[Key]:
    """Returns the keys of a model and of the models in it."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(Key(prefix + name, _type_in_words(field.annotation), _default(field), field.description or ""))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += describe_fields(field.annotation, f"{prefix}{name}.")
    return keys


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return REQUIRED
    default = field.get_default(call_default_factory=True, validated_data={})
    return default.model_dump() if isinstance(default, BaseModel) else default


_WORDS: dict[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true | false",
    dict: "mapping",
    type(None): "null",
    None: "null",
    Any: "anything",
}


def _type_in_words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_in_words(arguments[0])
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type_in_words(part) for part in arguments))
    if origin in (list, tuple, set, frozenset):
        items = [_type_in_words(part) for part in arguments if part is not Ellipsis]
        return f"list of {items[0]}" if items else "list"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return _WORDS.get(origin or annotation, re.sub(r"\w+\.", "", str(getattr(annotation, "__name__", annotation))))
