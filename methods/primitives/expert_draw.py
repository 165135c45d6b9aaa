"""Which expert of each matrix a forward pass uses: known again when activations are computed again in the backward."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from finetune.methods.primitives.carried import Carried

__all__ = ["DRAW", "Draw", "ForwardCount"]


@dataclass(frozen=True)
class Draw:
    """One stochastic pass through the model.

    Attributes:
        seeds: Adapter -> seed.
        counts: Adapter -> training forwards before this one.
        number: Number of the pass within this forward.
    """

    seeds: Mapping[str, int]
    counts: Mapping[str, int]
    number: int

    def expert(self, adapter: str, matrix: str, experts: int) -> int:
        """Returns the expert of a matrix: uniform, and a function of nothing but what is named here."""
        key = f"{self.seeds[adapter]} {self.counts[adapter]} {self.number} {matrix}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % experts


class ForwardCount(nn.Module):
    """How many training forwards an adapter has seen.

    It is a part of the state dict, and so of every checkpoint, but no buffer: it stays on the host, where the draw is
    made, whatever device the model goes to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.value = 0

    def get_extra_state(self) -> Tensor:
        """Returns the count, int64 ()."""
        return torch.tensor(self.value)

    def set_extra_state(self, state: Tensor) -> None:
        """Goes on from a count."""
        self.value = int(state)


DRAW: Carried[Draw] = Carried("draw")
"""The stochastic pass that is under way."""
