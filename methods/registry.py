"""Names of methods, filled by ``@register`` in every file of this package and by installed entry points."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import ValidationError

from finetune.core.errors import ConfigError, Problem, list_choices, nearest
from finetune.core.registry import Registry
from finetune.methods.base import Method

__all__ = ["ENTRY_POINT_GROUP", "METHODS", "build_method", "discover", "register"]

ENTRY_POINT_GROUP = "finetune.methods"
METHODS: Registry[type[Method]] = Registry("method", "finetune ls methods")
_NOT_METHODS = "finetune.methods.primitives."

M = TypeVar("M", bound=type[Method])


def register(name: str) -> Callable[[M], M]:
    """Returns a class decorator that makes a :class:`Method` available as ``name``."""

    def enter(method: M) -> M:
        METHODS.register(name)(method)
        method.name = name
        method.family = method.__module__.removeprefix("finetune.methods.").partition(".")[0]
        return method

    return enter


@functools.cache
def discover() -> Registry[type[Method]]:
    """Imports every module of the families and every entry point, and returns the filled registry."""
    package = importlib.import_module("finetune.methods")
    for module in pkgutil.walk_packages(package.__path__, "finetune.methods."):
        in_family = module.name.count(".") > 2
        if in_family and not module.name.startswith(_NOT_METHODS):
            importlib.import_module(module.name)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        entry_point.load()
    return METHODS


def build_method(spec: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Method:
    """Returns the method that a recipe's ``method`` section names, or the composition of a list of them.

    Raises:
        RegistryError: A name is unknown.
        ConfigError: A key of a method is unknown or has a value of another type.
        CapabilityError: Two methods cannot be composed in this order.
    """
    from finetune.methods.composition import Composition

    if isinstance(spec, Mapping):
        return _build_one(spec, "method")
    methods = [_build_one(entry, f"method.{number}") for number, entry in enumerate(spec)]
    if not methods:
        raise ConfigError("the list of methods is empty", where="method", fix="method: {name: lora}")
    return methods[0] if len(methods) == 1 else Composition(methods)


def _build_one(spec: Mapping[str, Any], where: str) -> Method:
    name = spec.get("name")
    if not isinstance(name, str):
        raise ConfigError("the method has no name", where=where, got=str(name), want=list_choices(discover()))
    method = discover().get(name, where=f"{where}.name")
    given = {key: value for key, value in spec.items() if key != "name"}
    try:
        return method(method.Config.model_validate(given))
    except ValidationError as error:
        problems = [
            Problem(
                f"method {method.name!r}: {detail['msg'][:1].lower()}{detail['msg'][1:]}",
                where=".".join([where, *map(str, detail["loc"])]),
                got=repr(detail["input"]),
                near=nearest(str(detail["loc"][-1]), method.Config.model_fields) if detail["loc"] else "",
                fix=f"finetune ls methods {method.name}",
            )
            for detail in error.errors()
        ]
        raise ConfigError.of(problems) from error
