"""The order of the training examples: a function of seed and epoch, of nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

__all__ = ["EpochSampler"]

_BATCHES_PER_GROUP = 50


class EpochSampler(Sampler[int]):
    """Shuffles anew each epoch; rows of a batch have about the same length where asked for.

    Random groups of 50 batches are sorted by length, cut into batches, and the batches are shuffled: padding goes, the
    order stays random. Resuming needs no state but the epoch and the position in it.

    Args:
        lengths: Tokens of each example.
        batch_size: Rows of an optimizer step over all processes, so that the order does not depend on how the step is
            cut into micro-batches and processes: a run may go on with other numbers of them.
        seed: Seed of the order.
        group_by_length: False for a plain shuffle.
        same_rows: Processes in a row that get the same batch: as often does each come, a short last one filled up.
        micro_batch: Rows of such a batch.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_size: int,
        seed: int,
        group_by_length: bool,
        same_rows: int = 1,
        micro_batch: int = 1,
    ) -> None:
        self._lengths = torch.tensor(lengths)
        self._batch_size = batch_size
        self._seed = seed
        self._group_by_length = group_by_length
        self._same_rows, self._micro_batch = same_rows, micro_batch
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of ``epoch``, counted from 0."""
        self._epoch = epoch

    def order(self, epoch: int) -> list[int]:
        """Returns the examples of ``epoch`` in order."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        shuffled = torch.randperm(len(self._lengths), generator=generator)
        if not self._group_by_length:
            return list(shuffled.tolist())
        batches = []
        for group in _cut(shuffled, self._batch_size * _BATCHES_PER_GROUP):
            by_length = group[self._lengths[group].argsort(descending=True, stable=True)]
            batches += _cut(by_length, self._batch_size)
        # Only whole batches move: one that is cut short in the middle would shift all rows after it.
        whole = [batch for batch in batches if len(batch) == self._batch_size]
        rest = [batch for batch in batches if len(batch) < self._batch_size]
        places = torch.randperm(len(whole), generator=generator).tolist()
        return [row for batch in [whole[place] for place in places] + rest for row in batch.tolist()]

    def tokens(self, step: int, *, rows_per_step: int, steps_per_epoch: int) -> int:
        """Returns the tokens, without padding, of the first ``step`` optimizer steps."""
        epoch, steps = divmod(step, steps_per_epoch)
        rows = self.order(epoch)[: steps * rows_per_step]
        return epoch * int(self._lengths.sum()) + int(self._lengths[rows].sum())

    def rows(self, step: int, *, rows_per_step: int, steps_per_epoch: int) -> list[int]:
        """Returns the examples of optimizer step ``step``, counted from 0."""
        epoch, position = divmod(step, steps_per_epoch)
        return self.order(epoch)[position * rows_per_step : (position + 1) * rows_per_step]

    def __iter__(self) -> Iterator[int]:
        order = self.order(self._epoch)
        if self._same_rows == 1:
            return iter(order)
        filled = itertools.islice(itertools.cycle(order), len(self) // self._same_rows)
        batches = _cut(torch.tensor(list(filled)), self._micro_batch)
        return (row for batch in batches for _ in range(self._same_rows) for row in batch.tolist())

    def __len__(self) -> int:
        rows = len(self._lengths)
        if self._same_rows == 1:
            return rows
        return math.ceil(rows / self._micro_batch) * self._micro_batch * self._same_rows


def _cut(rows: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
