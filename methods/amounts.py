"""An amount in a recipe: a share of a whole, or a number."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

__all__ = ["Amount", "count_of"]

Amount = Annotated[float, Field(gt=0, le=1)] | Annotated[int, Field(ge=1)]
"""A number with a point is a share in (0, 1], one without is a count: ``1.0`` is all, ``1`` is one."""


def count_of(amount: float | int, total: int) -> int:
    """Returns how many of ``total`` an amount is, at least one and at most all of them; shares are rounded up."""
    return min(total, amount if isinstance(amount, int) else math.ceil(amount * total))
