"""BAdam: one transformer layer after the other trains."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from finetune.core.errors import TrainingError
from finetune.methods.base import MethodConfig
from finetune.methods.registry import register
from finetune.methods.scheduled_tensors import ScheduledTensors, ScheduledTensorsConfig

__all__ = ["BAdam", "BAdamConfig"]

_SHORTEST, _LONGEST = 50, 100
"""Steps per block that the authors' rule allows."""


class BAdamConfig(ScheduledTensorsConfig):
    """In which order the layers train, and for how long each."""

    order: Literal["random", "ascending", "descending"] = Field(
        default="random", description="Order of the layers; random is another permutation in each round."
    )
    interval: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps per layer; null: the run divided by the layers, but 50 to 100.",
    )
    train_norm: bool = Field(default=False, description="Whether the norm after the last layer always trains.")
    seed: int = Field(default=0, description="Seed of the random order.")


@register("badam")
class BAdam(ScheduledTensors):
    """Block coordinate descent with Adam: one transformer layer trains for ``interval`` steps, then the next.

    Adam starts anew for each layer. Memory is 16 bytes per parameter of a single layer. With the embedding at rest, the
    backward pass ends at the active layer: on average it goes through half of them.

    References:
        Luo, Yu, Li, "BAdam: A Memory Efficient Full Parameter Optimization Method for Large Language Models",
        arXiv 2404.02827, algorithm 1.
    """

    paper: ClassVar[str] = "arXiv 2404.02827"
    Config: ClassVar[type[MethodConfig]] = BAdamConfig
    config: BAdamConfig

    def bind(self, *, total_steps: int) -> None:
        """Divides the run by the layers, unless the config says how long each trains."""
        self._interval = self.config.interval or min(max(total_steps // self.blocks, _SHORTEST), _LONGEST)

    def active_blocks(self, step: int) -> frozenset[int]:
        """Returns the one layer whose turn it is."""
        from finetune.methods.primitives.seeded_order import seeded_order

        if not self._is_scheduled():
            raise TrainingError(
                "badam does not know for how long each layer trains",
                fix="method.bind(total_steps=...) before training, or the method's key interval",
            )
        turn = step // (self.config.interval or self._interval)
        number = turn % self.blocks
        if self.config.order == "random":
            number = seeded_order(self.blocks, self.config.seed, turn // self.blocks)[number]
        elif self.config.order == "descending":
            number = self.blocks - 1 - number
        return frozenset({number})

    def _is_scheduled(self) -> bool:
        return self.config.interval is not None or hasattr(self, "_interval")

    def _notes(self) -> tuple[str, ...]:
        steps = f"{self.config.interval or self._interval} steps" if self._is_scheduled() else "50 to 100 steps"
        return (f"one of {self.blocks} layers at a time, {self.config.order} order, {steps} each",)
