"""Modules of one type, ranked by score: what is the same part in every layer is compared with itself only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Literal

__all__ = ["Rounding", "by_type", "module_type", "ranked", "share_of"]

Rounding = Literal["floor", "ceil"]


def module_type(name: str) -> str:
    """Returns the name of a module after its layer's number: ``model.layers.5.mlp.up_proj`` is ``mlp.up_proj``.

    A module without a number is a type of its own. In a model of several stacks the stack comes first.
    """
    parts = name.removesuffix(".weight").split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    if number is None:
        return ".".join(parts)
    stack = [part for part in parts[:number] if part in ("encoder", "decoder")]
    return ".".join(stack[:1] + parts[number + 1 :])


def by_type(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the modules of each type; types and modules in the order given."""
    types: dict[str, list[str]] = {}
    for name in names:
        types.setdefault(module_type(name), []).append(name)
    return types


def ranked(scores: Mapping[str, float]) -> dict[str, list[str]]:
    """Returns the modules of each type, highest score first; of equal ones the first."""
    return {kind: sorted(names, key=lambda name: -scores[name]) for kind, names in by_type(scores).items()}


def share_of(count: int, percent: float, rounding: Rounding = "floor") -> int:
    """Returns how many of ``count`` a percentage is: 29 % of 100 are 29, which binary fractions miss."""
    exact = Decimal(str(percent)) * count / 100
    return math.floor(exact) if rounding == "floor" else math.ceil(exact)
