"""FZOO: one-sided slopes along several directions, divided by the deviation of their losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from finetune.methods.base import MethodConfig
from finetune.methods.registry import register
from finetune.methods.zeroth_order.mezo import Mezo, MezoConfig

if TYPE_CHECKING:
    from finetune.methods.primitives.slope_rules import SlopeRule

__all__ = ["Fzoo", "FzooConfig"]


class FzooConfig(MezoConfig):
    """How many directions a step looks at."""

    queries: int = Field(
        default=8, ge=2, le=255, description="Directions of one step; a step takes one forward pass more."
    )

    @property
    def passes(self) -> int:
        """Forward passes of one step."""
        return self.queries + 1


@register("fzoo")
class Fzoo(Mezo):
    """Moves weights along several directions at once, in a step whose length does not depend on the gradient's.

    ``W <- W - lr / (N sigma) sum_i (L(W + eps z_i) - L(W)) z_i``, sigma the standard deviation of the N losses (FZOO,
    algorithm 1), in N + 1 forward passes. With gradient accumulation the steps of the micro-batches add up: divide the
    learning rate by their number. Memory and what is saved are those of ``mezo``.

    References:
        Dang et al., "FZOO: Fast Zeroth-Order Optimizer for Fine-Tuning Large Language Models towards Adam-Scale Speed",
        arXiv 2506.09034.
    """

    paper: ClassVar[str] = "arXiv 2506.09034"
    Config: ClassVar[type[MethodConfig]] = FzooConfig
    config: FzooConfig

    def _rule(self) -> SlopeRule:
        from finetune.methods.primitives.slope_rules import ONE_SIDED

        return ONE_SIDED
