"""Which parameters of a model entries may be chosen from."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from finetune.core.errors import ConfigError, TargetError, list_choices, nearest

__all__ = ["block_matrices", "choose_scope", "resolve_scope"]


def resolve_scope(
    model: nn.Module, candidates: Collection[str], *, include: Sequence[str] | None, exclude: Sequence[str]
) -> dict[str, nn.Parameter]:
    """Returns the parameters of the scope by name, in the order of ``model.named_parameters()``, a shared one once.

    Args:
        model: The model.
        candidates: Names that may be in the scope.
        include: Regular expressions that a name must contain one of; None means all matrices of the blocks.
        exclude: Regular expressions that a name must not contain.

    Raises:
        ConfigError: A pattern is no regular expression.
        TargetError: A pattern matches nothing, nothing is left, or a tensor has no entries of its own (quantised).
    """
    scope = choose_scope(
        model,
        {name: parameter for name, parameter in model.named_parameters() if name in candidates},
        include=include,
        exclude=exclude,
    )
    for name, parameter in scope.items():
        if not parameter.is_floating_point() or not parameter.is_contiguous():
            raise TargetError(
                f"entries of a {parameter.dtype} tensor cannot be chosen: the base is quantised",
                where=name,
                want="float32, bfloat16 or float16 weights",
                fix="an unquantised base model, or an adapter (method.name: lora)",
            )
    return scope


def choose_scope(
    model: nn.Module,
    allowed: dict[str, nn.Parameter],
    *,
    include: Sequence[str] | None,
    exclude: Sequence[str],
) -> dict[str, nn.Parameter]:
    """Returns those of the ``allowed`` parameters that are in the scope, as :func:`resolve_scope` says."""
    chosen = block_matrices(model, allowed) if include is None else _matching(allowed, include, "method.scope.include")
    dropped = _matching(chosen, exclude, "method.scope.exclude")
    scope = {name: parameter for name, parameter in chosen.items() if name not in dropped}
    if not scope:
        raise TargetError(
            f"the scope holds no parameter of {type(model).__name__}",
            where="method.scope",
            got=f"{len(allowed)} candidates, none of them in the scope",
            fix="a wider method.scope.include, or a narrower method.scope.exclude",
        )
    return scope


def block_matrices(model: Any, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Returns the matrices among ``parameters`` but embeddings and output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    outside = [module for module in model.modules() if isinstance(module, nn.Embedding)] + ([head] if head else [])
    taken = {id(parameter) for module in outside for parameter in module.parameters()}
    return {name: p for name, p in parameters.items() if p.ndim > 1 and id(p) not in taken}


def _matching(parameters: dict[str, nn.Parameter], patterns: Sequence[str], where: str) -> dict[str, nn.Parameter]:
    found: set[str] = set()
    for pattern in patterns:
        try:
            matches = {name for name in parameters if re.search(pattern, name)}
        except re.error as error:
            raise ConfigError("not a regular expression", where=where, got=pattern, want=str(error)) from error
        if not matches:
            leaves = dict.fromkeys(part for name in parameters for part in name.split(".") if not part.isdigit())
            raise TargetError(
                f"{pattern!r} matches no parameter that may train",
                where=where,
                want=list_choices(leaves),
                near=nearest(pattern, leaves),
            )
        found |= matches
    return {name: parameter for name, parameter in parameters.items() if name in found}
