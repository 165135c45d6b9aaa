"""SpIEL's choice while training: entries that changed least make room for those whose gradient is largest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor
from torch.optim import Optimizer

from finetune.core.learned_state import TRAINING
from finetune.methods.primitives.entry_choice import top_of
from finetune.methods.primitives.entry_pool import EntryTensor
from finetune.methods.primitives.entry_schedule import EntrySchedule
from finetune.methods.primitives.process_group import (
    PROPOSALS_PER_ENTRY,
    mean_over_processes,
    processes,
    union_over_processes,
)

__all__ = ["Regrowing", "RegrowingRule"]

_PARTS = ("candidates", "sum", "squares")


@dataclass(frozen=True)
class RegrowingRule:
    """When entries are replaced, and how many.

    Attributes:
        every: Optimizer steps between two replacements.
        gradient_steps: Steps before a replacement over which gradients of candidates are gathered.
        rate: Share of the entries that is replaced, falling linearly to zero over the run; the first replacement, of
            entries chosen at random, replaces all.
    """

    every: int
    gradient_steps: int
    rate: float

    def share(self, step: int, total: int | None) -> float:
        """Returns the share of entries to replace after ``step`` optimizer steps; 0 where it is not the time."""
        if step == 0 or step % self.every or (total is not None and step >= total):
            return 0.0
        return 1.0 if step == self.every else self.rate * (1 - step / total if total else 1)

    def gathers(self, step: int, total: int | None) -> bool:
        """Returns whether the gradients of the step after ``step`` steps are gathered."""
        following = step - step % self.every + self.every
        return step + self.gradient_steps >= following and self.share(following, total) > 0


@dataclass
class _Gathered:
    """What is gathered about the candidates of one tensor: positions, and sums over steps of g and of its square."""

    candidates: Tensor
    sum: Tensor
    squares: Tensor
    step: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.step = torch.zeros_like(self.sum)

    def only(self, places: Tensor) -> _Gathered:
        """Returns what is gathered about some of the candidates."""
        return _Gathered(self.candidates[places], self.sum[places], self.squares[places])


class Regrowing(EntrySchedule):
    """Replaces entries of a pool.

    The candidates of a tensor are, at the first gradient that is gathered, as many as it has entries. While the length
    of the run is not known, the rate does not fall.

    Args:
        rule: When to replace, and how many.
    """

    def __init__(self, rule: RegrowingRule) -> None:
        super().__init__()
        self._rule = rule
        self._gathered: dict[str, _Gathered] = {}

    def begin_pass(self) -> bool:
        """Returns whether this micro-batch is gathered."""
        return self._rule.gathers(self.step, self.total_steps)

    def observe(self, entries: EntryTensor, gradient: Tensor) -> None:
        """Adds the candidates' gradients of one tensor; the first gradient proposes them."""
        gathered = self._gathered.get(entries.name)
        if gathered is None:
            size = gradient.abs().float()
            size[entries.index] = -torch.inf
            # What is best by the mean over the processes may not be the very best for any of them.
            proposed = self._candidates_of(entries) * (PROPOSALS_PER_ENTRY if processes() > 1 else 1)
            index = union_over_processes(top_of(size, min(proposed, size.numel() - entries.index.numel())))
            zeros = torch.zeros(index.numel(), device=index.device)
            gathered = self._gathered[entries.name] = _Gathered(index, zeros, zeros.clone())
        gathered.step += gradient.index_select(0, gathered.candidates)

    def end_pass(self, gradient: Tensor) -> None:
        """Closes the step at its last micro-batch."""
        if not GradientState().sync_gradients:
            return
        for name, gathered in self._gathered.items():
            mean = mean_over_processes(gathered.step)
            count = self._candidates_of(self.pool.tensors[name])
            if mean.numel() > count:
                # Several processes proposed: the best of them by the mean are the candidates.
                best = top_of(mean.abs(), count)
                mean = mean[best]
                gathered = self._gathered[name] = gathered.only(best)
            gathered.sum += mean
            gathered.squares += mean.square()
            gathered.step.zero_()

    def _candidates_of(self, entries: EntryTensor) -> int:
        """Returns how many candidates a tensor has: as many as entries, if there are."""
        return min(entries.index.numel(), entries.weight.numel() - entries.index.numel())

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """Replaces entries where it is the time.

        New entries begin at their base value, with the moments that Adam would have had of the gathered gradients.
        """
        share = self._rule.share(self.step, self.total_steps)
        if share == 0:
            return
        moments = _Moments(optimizer, self.pool.values, self._rule.gradient_steps)
        for name, gathered in self._gathered.items():
            entries = self.pool.tensors[name]
            count = min(round(share * entries.index.numel()), gathered.candidates.numel())
            change = (self.pool.absolute(entries) - entries.base.float()).abs()
            dropped = top_of(-change, count)
            grown = top_of(gathered.sum.abs(), count)
            slot = self.pool.replace(entries, dropped, gathered.candidates[grown])
            moments.seed(slot, gathered.sum[grown], gathered.squares[grown])
            self.arrival[slot] = self.step - self._rule.gradient_steps
        self._gathered = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the position, and what has been gathered for the next replacement."""
        state = super().state_dict()
        for name, gathered in self._gathered.items():
            state |= {f"{TRAINING}{name}.{part}": getattr(gathered, part) for part in _PARTS}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores :meth:`state_dict`."""
        super().load_state_dict(state)
        self._gathered = {}
        for name, entries in self.pool.tensors.items():
            if f"{TRAINING}{name}.{_PARTS[0]}" in state:
                device = entries.weight.device
                parts = (state[f"{TRAINING}{name}.{part}"].to(device, copy=True) for part in _PARTS)
                self._gathered[name] = _Gathered(*parts)


class _Moments:
    """Adam's moments of the pool, where the optimizer has them."""

    def __init__(self, optimizer: Optimizer, values: Tensor, age: int) -> None:
        state: dict[str, Any] = optimizer.state.get(values, {})
        self._first, self._second = state.get("exp_avg"), state.get("exp_avg_sq")
        self._age = age
        group = next(g for g in optimizer.param_groups if any(p is values for p in g["params"]))
        self._betas = tuple(float(beta) for beta in group.get("betas", (0.0, 0.0)))

    def seed(self, slot: Tensor, total: Tensor, squares: Tensor) -> None:
        """Sets the moments at ``slot`` as after ``age`` steps of the mean gradient."""
        if self._first is not None and self._second is not None:
            self._first[slot] = (1 - self._betas[0] ** self._age) * total / self._age
            self._second[slot] = (1 - self._betas[1] ** self._age) * squares / self._age
