"""Gradual unfreezing and progressive freezing: layers join or leave one after the other."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from finetune.core.errors import TargetError, TrainingError
from finetune.methods.base import MethodConfig
from finetune.methods.registry import register
from finetune.methods.scheduled_tensors import ScheduledTensors, ScheduledTensorsConfig

__all__ = ["Gradual", "GradualConfig"]


class GradualConfig(ScheduledTensorsConfig):
    """Which layers join or leave, and when."""

    order: Literal["unfreeze", "freeze"] = Field(
        default="unfreeze",
        description="unfreeze: layers join from the top down; freeze: all train at first and leave from the bottom up.",
    )
    start: int = Field(
        default=1, ge=1, description="Top layers that train from the first step (unfreeze) or to the last."
    )
    every: int | None = Field(
        default=None, ge=1, description="Optimizer steps between two layers; null: spread evenly over the run."
    )


@register("gradual")
class Gradual(ScheduledTensors):
    """Trains the top layers, from step to step one more (``unfreeze``) or one fewer (``freeze``).

    The backward pass ends at the lowest layer that trains, so steps with few layers are cheap.

    References:
        Howard, Ruder, "Universal Language Model Fine-tuning for Text Classification", arXiv 1801.06146, section 3.3
        (unfreeze); Brock et al., "FreezeOut", arXiv 1706.04983 (freeze).
    """

    paper: ClassVar[str] = "arXiv 1801.06146"
    Config: ClassVar[type[MethodConfig]] = GradualConfig
    config: GradualConfig

    def bind(self, *, total_steps: int) -> None:
        """Spreads the layers over ``total_steps``, unless the config says when they change."""
        self._every = self.config.every or max(1, total_steps // (self.blocks - self.config.start + 1))

    def active_blocks(self, step: int) -> frozenset[int]:
        """Returns the top layers that train."""
        if not self._is_scheduled():
            raise TrainingError(
                "gradual does not know how long the run is",
                fix="method.bind(total_steps=...) before training, or the method's key every",
            )
        if self.config.start > self.blocks:
            raise TargetError(f"the model has {self.blocks} layers", where="method.start", got=str(self.config.start))
        changes = min(step // (self.config.every or self._every), self.blocks - self.config.start)
        count = self.config.start + changes if self.config.order == "unfreeze" else self.blocks - changes
        return frozenset(range(self.blocks - count, self.blocks))

    def _is_scheduled(self) -> bool:
        return self.config.every is not None or hasattr(self, "_every")

    def _notes(self) -> tuple[str, ...]:
        steps = f"{self.config.every or self._every} steps" if self._is_scheduled() else "some steps"
        verb = "joins" if self.config.order == "unfreeze" else "leaves"
        return (f"of {self.blocks} layers one {verb} every {steps}", *self._share_that_always_trains())
