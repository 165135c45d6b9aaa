"""Base of what chooses entries while training: where it is in the run, and how old each entry is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from finetune.core.learned_state import TRAINING
from finetune.methods.primitives.entry_pool import EntryPool, EntryTensor

__all__ = ["EntrySchedule"]

_STEP, _ARRIVAL = f"{TRAINING}step", f"{TRAINING}arrival"


class EntrySchedule(ABC):
    """An :class:`~finetune.methods.primitives.entry_pool.Observer` with a position in the run.

    Attributes:
        pool: What it chooses entries of.
        step: Optimizer steps taken.
        total_steps: Optimizer steps of the schedule; None until they are known.
        arrival: ``step`` from which the age of each slot's moments counts, int32 (B,).
    """

    pool: EntryPool
    arrival: Tensor

    def __init__(self) -> None:
        self.step = 0
        self.total_steps: int | None = None

    def watch(self, pool: EntryPool) -> None:
        """Takes over the choosing in ``pool``."""
        self.pool = pool
        self.arrival = torch.zeros(pool.values.numel(), dtype=torch.int32, device=pool.values.device)

    @abstractmethod
    def begin_pass(self) -> bool:
        """Returns whether this backward pass has to show the dense gradients."""

    def observe_factors(self, entries: EntryTensor, grad: Tensor, x: Tensor) -> bool:
        """Returns that the factors of a gradient are not enough."""
        return False

    @abstractmethod
    def observe(self, entries: EntryTensor, gradient: Tensor) -> None:
        """Sees the flat dense gradient of one tensor."""

    @abstractmethod
    def end_pass(self, gradient: Tensor) -> None:
        """Sees the pool's gradient before it is delivered."""

    def after_step(self, optimizer: Optimizer) -> None:  # noqa: B027 - most choose in the backward pass
        """Comes after an optimizer step, when the weights hold the values."""

    @property
    def age(self) -> Tensor:
        """Steps in which each slot's entry has had a gradient, int64 (B,)."""
        return self.step - self.arrival.to(self.pool.values.device).long()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the position and the arrivals."""
        return {_STEP: torch.tensor(self.step), _ARRIVAL: self.arrival}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores :meth:`state_dict`.

        Raises:
            KeyError: A tensor is missing.
        """
        self.step = int(state[_STEP])
        self.arrival.copy_(state[_ARRIVAL])
