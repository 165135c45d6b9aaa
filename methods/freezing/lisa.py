"""LISA: a few transformer layers, drawn anew every some steps, train."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from finetune.core.errors import TargetError
from finetune.methods.base import MethodConfig
from finetune.methods.registry import register
from finetune.methods.scheduled_tensors import ScheduledTensors, ScheduledTensorsConfig

__all__ = ["LISA", "LISAConfig"]


class LISAConfig(ScheduledTensorsConfig):
    """How many layers train at a time, and for how long."""

    layers: int = Field(default=2, ge=1, description="Layers that train at a time.")
    interval: int = Field(default=20, ge=1, description="Optimizer steps after which others are drawn.")
    seed: int = Field(default=0, description="Seed of the draws.")


@register("lisa")
class LISA(ScheduledTensors):
    """Trains ``layers`` transformer layers at a time, drawn uniformly and without replacement every ``interval`` steps.

    Memory is that of training these layers: 4 bytes master (of a 16-bit base), 4 gradient and 8 Adam per parameter of
    theirs. The draws are a function of the seed and the step, the same in every process and after a resume.

    Differences from the authors' code: embeddings and head rest unless asked for (in an 8 B Llama they are 71 % of what
    the published form trains), and the optimizer's state of a layer that rests is dropped, as the paper's runs did by
    starting anew each interval, and their released trainer did not.

    References:
        Pan et al., "LISA: Layerwise Importance Sampling for Memory-Efficient Large Language Model Fine-Tuning",
        arXiv 2403.17919, algorithm 1.
    """

    paper: ClassVar[str] = "arXiv 2403.17919"
    Config: ClassVar[type[MethodConfig]] = LISAConfig
    config: LISAConfig

    def active_blocks(self, step: int) -> frozenset[int]:
        """Returns the layers of the draw number ``step // interval``."""
        from finetune.methods.primitives.seeded_order import seeded_order

        if self.config.layers > self.blocks:
            raise TargetError(f"the model has {self.blocks} layers", where="method.layers", got=str(self.config.layers))
        return frozenset(
            seeded_order(self.blocks, self.config.seed, step // self.config.interval)[: self.config.layers]
        )

    def _notes(self) -> tuple[str, ...]:
        config = self.config
        drawn = f"{config.layers} of {self.blocks} layers at a time, drawn every {config.interval} steps"
        return (drawn, *self._share_that_always_trains())
