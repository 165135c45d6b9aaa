"""ID3's choice while training: at every optimizer step the entries of highest score join those that train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from accelerate.state import GradientState
from torch import Tensor

from finetune.core.errors import TrainingError
from finetune.methods.primitives.entry_choice import TopEntries, offsets_of, top_of
from finetune.methods.primitives.entry_pool import EntryPool, EntryTensor
from finetune.methods.primitives.entry_schedule import EntrySchedule
from finetune.methods.primitives.gradient_block import GradientBlock, block_in_reach, columns_in_reach
from finetune.methods.primitives.process_group import (
    PROPOSALS_PER_ENTRY,
    mean_over_processes,
    processes,
    union_over_processes,
)

__all__ = ["Unmasking", "UnmaskingRule", "unmasked_by"]

_WORTHWHILE = 0.5
"""Share of a gradient above which picking rows and columns costs more than it saves."""


@dataclass(frozen=True)
class UnmaskingRule:
    """Which entries are unmasked, and when.

    Attributes:
        exponent: e of the score ``|g| / (|w| + epsilon)^e``.
        epsilon: Keeps the score of small weights finite.
        schedule: ``uniform`` spreads the budget over the steps; ``frontload`` gives the first steps the remainder.
        select_every: Steps whose quotas are unmasked together, at the first of them.
        accumulation: With gradient accumulation the score needs the sum of all micro-batches: ``exact`` keeps it whole;
            ``candidates`` keeps it for the best entries of the first; ``last`` scores by the last alone.
    """

    exponent: float
    epsilon: float
    schedule: Literal["uniform", "frontload"]
    select_every: int
    accumulation: Literal["exact", "last", "candidates"]

    def score(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Returns the D3 score of entries, float32, of their shape; infinite where the gradient is not finite."""
        magnitude = gradient.abs().float().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        if self.exponent == 0:
            return magnitude
        return magnitude.div_(weight.abs().float().add_(self.epsilon).pow_(self.exponent))

    def least_gradient(self, score: Tensor) -> Tensor:
        """Returns the size of a gradient below which no entry reaches ``score``; 0 where large weights are favoured."""
        return score * (self.epsilon**self.exponent if self.exponent >= 0 else 0.0)


def unmasked_by(step: int, *, budget: int, steps: int, schedule: str) -> int:
    """Returns how many entries are unmasked after ``step`` of ``steps`` optimizer steps; all of them from then on."""
    step = min(step, steps)
    if schedule == "uniform":
        return budget * step // steps
    return budget // steps * step + min(step, budget % steps)


class Unmasking(EntrySchedule):
    """Fills a pool step by step.

    Over several processes the score is that of the mean gradient: each proposes candidates, and only their gradients
    travel, unless ``accumulation`` is ``exact``.

    Args:
        rule: What to unmask, and when.
    """

    def __init__(self, rule: UnmaskingRule) -> None:
        super().__init__()
        self._rule = rule
        self._sums: dict[str, Tensor] = {}
        self._candidates: dict[str, Tensor] = {}
        self._quota = 0
        self._last = True
        self._top: TopEntries | None = None

    def watch(self, pool: EntryPool) -> None:
        """Takes over the filling of ``pool``."""
        super().watch(pool)
        self._offsets = offsets_of({name: entries.weight.numel() for name, entries in pool.tensors.items()})

    def begin_pass(self) -> bool:
        """Returns whether this micro-batch counts for a choice."""
        self._quota = self._open_quota()
        # accelerate, and with it every trainer, says here whether the optimizer will step after this micro-batch.
        self._last = GradientState().sync_gradients
        if self._quota == 0 or (self._rule.accumulation == "last" and not self._last):
            return False
        self._top = TopEntries(self._offsets, self._quota)
        return True

    def _open_quota(self) -> int:
        if self.total_steps is None:
            raise TrainingError(
                "id3 does not know over how many steps to unmask its budget",
                fix="method.bind(total_steps=...) before training, or the method's key steps",
            )
        if self.step % self._rule.select_every and self.step < self.total_steps:
            return 0
        reached = self.step + self._rule.select_every
        due = unmasked_by(
            reached, budget=self.pool.values.numel(), steps=self.total_steps, schedule=self._rule.schedule
        )
        return max(0, due - self.pool.chosen)

    def observe_factors(self, entries: EntryTensor, grad: Tensor, x: Tensor) -> bool:
        """Scores one tensor by the block of its gradient that can hold what is unmasked, where it is small."""
        assert self._top is not None
        # oneDNN prepares a 16-bit product anew for every size of a block, and that takes longer than the whole does.
        if grad.dtype != torch.float32 or self._top.bound is None or not self._complete(entries):
            return False
        block = block_in_reach(grad, x, self._rule.least_gradient(self._top.bound))
        if block.share > _WORTHWHILE:
            return False
        gradient = block.product(grad, x)
        self._score_block(entries, block, gradient, gradient)
        return True

    def _complete(self, entries: EntryTensor) -> bool:
        """Returns whether the gradient of this micro-batch in this process is all that a tensor's score needs."""
        earlier = self._sums if self._rule.accumulation == "exact" else self._candidates
        return self._last and processes() == 1 and entries.name not in earlier

    def observe(self, entries: EntryTensor, gradient: Tensor) -> None:
        """Scores the entries of one tensor by its flat dense gradient, or keeps what the score will need."""
        if self._rule.accumulation == "exact":
            self._observe_sum(entries, gradient)
        elif self._complete(entries):
            self._score(entries, gradient, gradient)
        else:
            self._observe_candidates(entries, gradient)

    def _observe_sum(self, entries: EntryTensor, gradient: Tensor) -> None:
        if entries.name in self._sums:
            gradient = self._sums.pop(entries.name).add_(gradient)
        elif not self._last or processes() > 1:
            gradient = gradient.clone()
        if not self._last:
            self._sums[entries.name] = gradient
            return
        self._score(entries, mean_over_processes(gradient), gradient)

    def _observe_candidates(self, entries: EntryTensor, gradient: Tensor) -> None:
        index = self._candidates.get(entries.name)
        if index is None:
            scores = self._open_scores(entries, gradient)
            index = union_over_processes(top_of(scores, PROPOSALS_PER_ENTRY * self._quota))
            self._candidates[entries.name] = index
        own = gradient.index_select(0, index).float()
        self._sums[entries.name] = self._sums[entries.name] + own if entries.name in self._sums else own

    def _open_scores(self, entries: EntryTensor, gradient: Tensor) -> Tensor:
        """Returns the scores of a tensor's entries, minus infinity for those that train already."""
        scores = self._rule.score(gradient, entries.flat)
        scores[entries.index] = -torch.inf
        return scores

    def _score(self, entries: EntryTensor, gradient: Tensor, own: Tensor) -> None:
        assert self._top is not None
        if self._top.bound is not None:
            block = columns_in_reach(gradient, self._rule.least_gradient(self._top.bound))
            if block.share <= _WORTHWHILE:
                self._score_block(entries, block, block.of(gradient), block.of(own))
                return
        self._top.add(entries.name, self._open_scores(entries, gradient), own)

    def _score_block(self, entries: EntryTensor, block: GradientBlock, gradient: Tensor, own: Tensor) -> None:
        assert self._top is not None
        scores = self._rule.score(gradient, block.of(entries.flat))
        scores[block.places(entries.index)] = -torch.inf
        self._top.add(entries.name, scores, own, block.positions())

    def end_pass(self, gradient: Tensor) -> None:
        """Unmasks the best entries, in the backward pass, so that clipping sees their gradients."""
        if not self._last:
            return
        assert self._top is not None
        if self._candidates:
            self._score_candidates(self._top)
        chosen, scores = self._top.result()
        self._sums, self._candidates, self._top = {}, {}, None
        # A gradient scaler skips the step of a gradient that is not finite, and tries again.
        if not bool(torch.isfinite(scores).all()):
            return
        start = self.pool.chosen
        for name, (index, own) in chosen.items():
            slot = torch.arange(start, start + index.numel(), device=index.device)
            self.pool.extend(self.pool.tensors[name], index, slot)
            gradient[slot] = own.float()
            self.arrival[slot] = self.step
            start += index.numel()

    def _score_candidates(self, top: TopEntries) -> None:
        own = torch.cat([self._sums[name] for name in self._candidates])
        mean, start = mean_over_processes(own), 0
        for name, index in self._candidates.items():
            part = slice(start, start + index.numel())
            weight = self.pool.tensors[name].flat.index_select(0, index)
            top.add_some(name, index, self._rule.score(mean[part], weight), own[part])
            start = part.stop
