"""Names of what a zeroth-order method minimises: slopes need no gradient, so that any number will do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator

from finetune.core.errors import ConfigError, list_choices, nearest

__all__ = ["NEEDS_OPTIONS", "OBJECTIVES", "SMOOTH", "Objective", "load_objective"]

OBJECTIVES = ("loss", "option_likelihood", "accuracy", "exact_match", "f1")
"""The model's own loss, and those of :mod:`finetune.methods.primitives.objectives`."""
NEEDS_OPTIONS = frozenset({"option_likelihood", "accuracy"})
"""Objectives that compare the options of a question."""
SMOOTH = frozenset({"loss", "option_likelihood"})
"""Objectives whose values change with any step."""


def _as_name(value: Any) -> Any:
    """Returns the name by which a function is found again when a run goes on."""
    if isinstance(value, str) and ":" not in value and value not in OBJECTIVES:
        near = nearest(value, OBJECTIVES)
        meant = f" (did you mean {near!r}?)" if near else ""
        raise ValueError(f"{list_choices(OBJECTIVES)}, or module:function{meant}")
    if not callable(value):
        return value
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if "<" in name or not module or not name:
        raise ValueError(f"a function that can be imported by its name, not {name or type(value).__name__}")
    return f"{module}:{name}"


Objective = Annotated[str, BeforeValidator(_as_name, json_schema_input_type=str)]
"""One of :data:`OBJECTIVES`, or ``module:function``; in Python the function itself."""


def load_objective(name: str) -> Callable[..., Any]:
    """Returns the function ``objective(model, batch)`` that ``name`` means; not of ``loss``, which the model has.

    Raises:
        ConfigError: There is no such objective.
    """
    if name in OBJECTIVES:
        from finetune.methods.primitives import objectives

        named: Callable[..., Any] = getattr(objectives, name)
        return named
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the objective cannot be imported: {error}", where="method.objective", got=name, want="module:function"
        ) from error
    if not callable(found):
        raise ConfigError(
            "the objective is no function", where="method.objective", got=f"{name}, a {type(found).__name__}"
        )
    function: Callable[..., Any] = found
    return function
