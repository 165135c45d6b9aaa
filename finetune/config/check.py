"""Checks data against a model and says what is wrong in the project's form, all of it at once."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from finetune.config.aliases import answer_alias
from finetune.config.given import Given
from finetune.config.yaml12 import flow_yaml, resolve_scalar
from finetune.core.errors import Problem, list_choices, nearest

__all__ = ["Checked", "check"]

M = TypeVar("M", bound=BaseModel)

_WANT = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list without repetitions",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "none_required": "null",
    "string_too_short": "text that is not empty",
    "too_short": "at least one",
}
_BOUNDS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
_BOOLEAN_WORDS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


@dataclass
class Checked(Generic[M]):
    """What a check came to.

    Attributes:
        value: The model, or None where something is wrong.
        problems: All that is wrong.
        warnings: What was understood although it was written otherwise.
    """

    value: M | None = None
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check(model: type[M], data: Any, given: Given, *, prefix: str = "", known: Iterable[str] = ()) -> Checked[M]:
    """Returns ``data`` as a ``model``, or all that is wrong with it.

    Text that is a number where a number is wanted is taken with a warning, and a float without a fraction is taken
    where a whole number is wanted; nothing else is converted.

    Args:
        model: The schema.
        data: What was given for it.
        given: Where it came from.
        prefix: Dotted key of ``data`` in the recipe, with a dot at its end, or empty.
        known: All keys of a recipe, to find the one that was meant.
    """
    data = copy.deepcopy(data)
    warnings: list[str] = []
    try:
        return Checked(model.model_validate(data), warnings=warnings)
    except ValidationError as error:
        notes = [_convert(data, details, given, prefix) for details in error.errors()]
    warnings += [note for note in notes if note]
    try:
        return Checked(model.model_validate(data), warnings=warnings)
    except ValidationError as error:
        grouped = _by_path(data, error.errors())
        known = list(known)
        problems = {path: _problem(path, errors, given, prefix, known) for path, errors in grouped.items()}
        meant = [problem.near for problem in problems.values()]
        missing = [path for path, errors in grouped.items() if errors[0]["type"] == "missing"]
        # That a key is missing is no second problem where another one is its misspelling.
        answered = {path for path in missing if any(f"{near}.".startswith(_dotted(prefix, path)) for near in meant)}
        return Checked(problems=[p for path, p in problems.items() if path not in answered], warnings=warnings)


def _convert(data: Any, details: ErrorDetails, given: Given, prefix: str) -> str | None:
    """Puts the number that was meant into ``data``; returns a warning if there is something to say."""
    path, value = _path(data, details), details["input"]
    container = data
    for segment in path[:-1]:
        container = container[segment]
    if details["type"] == "float_type" and isinstance(value, str):
        number = resolve_scalar(value.strip())
        if isinstance(number, int | float) and not isinstance(number, bool):
            container[path[-1]] = float(number)
            key = _dotted(prefix, path)[:-1]
            return f"{given.where(key)} is the text {value!r}, which is taken as the number {number}"
    elif details["type"] in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        container[path[-1]] = int(value)
    return None


def _path(data: Any, details: ErrorDetails) -> tuple[str | int, ...]:
    """Returns where in ``data`` an error lies: pydantic's location without names of types and wrapped lists."""
    path: list[str | int] = []
    for segment in details["loc"]:
        inside = isinstance(data, dict) and segment in data
        inside = inside or (isinstance(data, list) and isinstance(segment, int) and segment < len(data))
        if inside:
            path.append(segment)
            data = data[segment]
    return (*path, details["loc"][-1]) if details["type"] == "missing" else tuple(path)


def _dotted(prefix: str, path: Iterable[str | int]) -> str:
    return f"{prefix}{'.'.join(map(str, path))}."


def _by_path(data: Any, errors: Sequence[ErrorDetails]) -> dict[tuple[str | int, ...], list[ErrorDetails]]:
    grouped: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for details in errors:
        grouped.setdefault(_path(data, details), []).append(details)
    # Where one form of a union got as far as a key inside, what the other forms say about the whole is noise.
    return {
        path: errors
        for path, errors in grouped.items()
        if not any(len(other) > len(path) and other[: len(path)] == path for other in grouped)
    }


def _problem(
    path: tuple[str | int, ...], errors: Sequence[ErrorDetails], given: Given, prefix: str, known: Sequence[str]
) -> Problem:
    key = _dotted(prefix, path)[:-1]
    kinds = {details["type"] for details in errors}
    value = errors[0]["input"]
    if not path and kinds == {"value_error"}:
        # Keys that do not go together: what is said about them says it all.
        what = "; ".join(str(details["ctx"]["error"]) for details in errors)
        return Problem(what, given.where(prefix.rstrip(".")), got=flow_yaml(value))
    if "missing" in kinds:
        return Problem(f"{key} is missing", given.where(key.rpartition(".")[0]))
    if "extra_forbidden" in kinds:
        return _unknown_key(key, value, given, known)
    choices = [choice for details in errors for choice in _choices(details)]
    want = list_choices(choices, more=f"`finetune validate RECIPE --explain {key}`") if choices else _want(errors)
    near = _BOOLEAN_WORDS.get(str(value).lower(), "") if "bool_type" in kinds else nearest(str(value), choices)
    wrong_type = all(kind.endswith(("_type", "none_required")) for kind in kinds)
    what = "value of the wrong type" if wrong_type else "value that is not allowed"
    fix = f"{key}: {near}" if near else ""
    return Problem(what, given.where(key), got=flow_yaml(value), want=want, near=near, fix=fix)


def _unknown_key(key: str, value: Any, given: Given, known: Sequence[str]) -> Problem:
    where = given.where(key)
    section, _, leaf = key.rpartition(".")
    if answer := answer_alias(key, value, where):
        return answer
    elsewhere = [name for name in known if name.rpartition(".")[2] == leaf]
    if elsewhere:
        what = f"{leaf!r} is a key of {elsewhere[0].rpartition('.')[0] or 'the top level'}"
        return Problem(what, where, near=elsewhere[0], fix=f"{elsewhere[0]}: {flow_yaml(value)}")
    plain_section = re.sub(r"\.\d+", "", section)
    siblings = [name for name in known if name.rpartition(".")[0] == plain_section]
    near = nearest(leaf, [name.rpartition(".")[2] for name in siblings])
    near = f"{section}.{near}".lstrip(".") if near else _nearest_leaf(leaf, known)
    more = "`finetune validate --schema`"
    want = list_choices((name.rpartition(".")[2] for name in siblings), more=more)
    return Problem(f"unknown key {leaf!r}", where, want="" if near else want, near=near)


def _nearest_leaf(leaf: str, known: Sequence[str]) -> str:
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(known)}
    return by_leaf.get(nearest(leaf, by_leaf), "")


def _choices(details: ErrorDetails) -> list[str]:
    """Returns the members of a Literal."""
    expected = details.get("ctx", {}).get("expected", "") if details["type"] == "literal_error" else ""
    return re.findall(r"'([^']*)'", expected)


def _want(errors: Sequence[ErrorDetails]) -> str:
    return " or ".join(dict.fromkeys(_phrase(details) for details in errors))


def _phrase(details: ErrorDetails) -> str:
    if phrase := _WANT.get(details["type"]):
        return phrase
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    for bound, words in _BOUNDS.items():
        if bound in details.get("ctx", {}):
            return f"{words} {details['ctx'][bound]:g}"
    return details["msg"][0].lower() + details["msg"][1:]
