"""Names of scorers, filled by ``@register`` in every file of ``scorers`` and by installed entry points."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import ValidationError

from finetune.core.errors import ConfigError, Problem, list_choices, nearest
from finetune.core.registry import Registry
from finetune.data_selection.base import Scorer

__all__ = ["ENTRY_POINT_GROUP", "SCORERS", "build_scorer", "discover", "register"]

ENTRY_POINT_GROUP = "finetune.scorers"
SCORERS: Registry[type[Scorer]] = Registry("scorer", "finetune ls selectors")
_SCORERS = "finetune.data_selection.scorers"

S = TypeVar("S", bound=type[Scorer])


def register(name: str) -> Callable[[S], S]:
    """Returns a class decorator that makes a :class:`Scorer` available as ``name``."""

    def enter(scorer: S) -> S:
        SCORERS.register(name)(scorer)
        scorer.name = name
        return scorer

    return enter


@functools.cache
def discover() -> Registry[type[Scorer]]:
    """Imports every scorer and every entry point, and returns the filled registry."""
    package = importlib.import_module(_SCORERS)
    for module in pkgutil.iter_modules(package.__path__, f"{_SCORERS}."):
        importlib.import_module(module.name)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        entry_point.load()
    return SCORERS


def build_scorer(spec: Mapping[str, Any], where: str = "select.scorer") -> Scorer:
    """Returns the scorer that ``{name, and its own keys}`` describes.

    Args:
        spec: What a recipe's ``select.scorer`` says.
        where: What the section is called in messages.

    Raises:
        RegistryError: The name is unknown.
        ConfigError: A key is unknown or has a value that is not accepted.
    """
    name = spec.get("name")
    if not isinstance(name, str):
        raise ConfigError("the scorer has no name", where=where, got=str(name), want=list_choices(discover()))
    scorer = discover().get(name, where=f"{where}.name")
    try:
        return scorer(scorer.Config.model_validate({key: value for key, value in spec.items() if key != "name"}))
    except ValidationError as error:
        problems = [
            Problem(
                f"scorer {scorer.name!r}: {detail['msg'][:1].lower()}{detail['msg'][1:]}",
                where=".".join([where, *map(str, detail["loc"])]),
                got=repr(detail["input"]),
                near=nearest(str(detail["loc"][-1]), scorer.Config.model_fields) if detail["loc"] else "",
                fix=f"finetune ls selectors {scorer.name}",
            )
            for detail in error.errors()
        ]
        raise ConfigError.of(problems) from error
