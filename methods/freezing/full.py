"""Full fine-tuning: every parameter trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from finetune.methods.registry import register
from finetune.methods.whole_tensors import WholeTensors

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Full"]


@register("full")
class Full(WholeTensors):
    """Trains every parameter of the model: the reference that the other methods are measured against.

    ``W <- W - optimizer(dL/dW)`` for all of them, embeddings and norms included. Memory per parameter: 4 bytes value, 4
    gradient, 8 Adam. Saved: every tensor, a tied one once, and it stays tied.
    """

    def choose(self, model: nn.Module, candidates: frozenset[str]) -> Sequence[str]:
        """Returns all candidates."""
        return [name for name, _ in model.named_parameters() if name in candidates]
