"""Base of the methods whose choice of entries changes while they train."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from finetune.core.errors import CheckpointError
from finetune.methods.selected_entries import SelectedEntries

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from finetune.methods.primitives.entry_schedule import EntrySchedule

__all__ = ["ScheduledEntries"]


class ScheduledEntries(SelectedEntries):
    """Trains entries that a schedule chooses, in the backward pass or after an optimizer step.

    The schedule's position is part of the state, so that a run resumed in the middle goes on exactly.
    """

    own_optimizer: ClassVar[str] = "its optimizer state moves with the entries that it chooses while it trains"

    @abstractmethod
    def _make_schedule(self) -> EntrySchedule:
        """Returns what chooses."""

    def _ages_per_entry(self) -> bool:
        """Returns whether Adam's bias correction goes by the age of each entry."""
        return True

    def _observer(self) -> EntrySchedule:
        self._schedule: EntrySchedule = self._make_schedule()
        return self._schedule

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        from finetune.methods.primitives.entry_age import EntryAge
        from finetune.methods.primitives.step_sync import before_optimizer_step

        model = super()._attach(model, candidates)
        self._schedule.watch(self._pool)
        self._age: EntryAge | None = None
        if self._ages_per_entry():
            self._age = EntryAge(self._pool.values)
            self._before = before_optimizer_step([self._pool.values], self._age.remember)
        return model

    def bind(self, *, total_steps: int) -> None:
        """Lays the schedule over the run."""
        self._schedule.total_steps = total_steps

    def _after_step(self, optimizer: Optimizer) -> None:
        # A gradient scaler lets a fused optimizer skip the step within itself.
        skipped = getattr(optimizer, "found_inf", None)
        if skipped is not None and bool(skipped):
            return
        self._schedule.step += 1
        if self._age is not None:
            self._age.correct(optimizer, self._schedule.age)
        super()._after_step(optimizer)
        self._schedule.after_step(optimizer)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what is chosen, since when, and where the schedule is."""
        return {**super().state_dict(), **self._schedule.state_dict()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what is chosen and where the schedule is; strict."""
        super().load_state_dict(state)
        try:
            self._schedule.load_state_dict(state)
        except KeyError as error:
            raise CheckpointError("the learned state does not say where training was", got=str(error)) from error

    def merge(self) -> nn.Module:
        """Makes the modules plain again; their weights hold the trained entries already."""
        if self._age is not None:
            self._before.remove()
        return super().merge()
