"""Exact choices of entries: so many, never more or fewer, ties included.

Higher scores come first; of equal ones the entry that comes first in the order of tensors and, within a tensor, of
rows. Tensors are gone through one at a time: nothing of the size of the whole scope is held.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

__all__ = ["TopEntries", "even_quotas", "offsets_of", "random_entries", "top_of", "top_overall", "top_per_tensor"]


def top_of(scores: Tensor, count: int) -> Tensor:
    """Returns the positions, int64 ascending, of the ``count`` largest of a vector; of equal ones the first."""
    if count >= scores.numel():
        return torch.arange(scores.numel(), device=scores.device)
    if count <= 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    bound = scores.topk(count, sorted=True).values[-1]
    above = (scores > bound).nonzero().reshape(-1)
    equal = (scores == bound).nonzero().reshape(-1)[: count - above.numel()]
    return torch.cat([above, equal]).sort().values


class TopEntries:
    """The ``count`` entries of highest score among tensors that are shown one after the other, in any order.

    Args:
        offsets: Tensor name -> position of its first entry in the order that decides between equal scores.
        count: How many to keep.

    Attributes:
        bound: Score below which no further entry can be kept, float32 (); None until so many have been considered.
    """

    def __init__(self, offsets: Mapping[str, int], count: int) -> None:
        self._offsets = offsets
        self._count = count
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self._kept = 0
        self.bound: Tensor | None = None

    def add(self, name: str, scores: Tensor, payload: Tensor, positions: Tensor | None = None) -> None:
        """Considers entries of one tensor.

        Args:
            name: The tensor.
            scores: float32 (n,); minus infinity for entries that must not be taken.
            payload: What to keep of each that is taken (n,).
            positions: Flat position of each, int64 ascending (n,); None: these are all entries of the tensor.
        """
        places = None
        if self.bound is not None:
            # Entries below what is known to be reached anyway need no sorting.
            places = (scores >= self.bound).nonzero().reshape(-1)
            scores = scores.index_select(0, places)
        top = top_of(scores, self._count)
        index = top if places is None else places.index_select(0, top)
        scores = scores.index_select(0, top)
        taken = scores != -torch.inf
        index = index[taken]
        position = index if positions is None else positions.index_select(0, index)
        self.add_some(name, position, scores[taken], payload.index_select(0, index))

    def add_some(self, name: str, index: Tensor, scores: Tensor, payload: Tensor) -> None:
        """Considers the entries at the flat positions ``index``, int64 (K,), of one tensor."""
        self._parts.append((scores, index + self._offsets[name], payload))
        self._kept += index.numel()
        if self._kept >= 4 * self._count or (self.bound is None and self._kept >= self._count):
            self._prune()

    def result(self) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
        """Returns tensor name -> (positions, int64 ascending; payload) of what is kept, and the scores (K,)."""
        self._prune()
        if not self._parts:
            return {}, torch.empty(0)
        scores, position, payload = self._parts[0]
        names = sorted(self._offsets, key=lambda name: self._offsets[name])
        starts = torch.tensor([self._offsets[name] for name in names], device=position.device)
        owner = torch.searchsorted(starts, position, right=True) - 1
        # Positions ascend, so the entries of one tensor lie together.
        counts = owner.bincount(minlength=len(names)).tolist()
        result, start = {}, 0
        for name, count in zip(names, counts, strict=True):
            if count:
                own = slice(start, start + count)
                result[name] = (position[own] - self._offsets[name], payload[own])
                start += count
        return result, scores

    def _prune(self) -> None:
        if not self._parts:
            return
        scores, position, payload = (torch.cat(column) for column in zip(*self._parts, strict=True))
        order = position.argsort()
        scores, position, payload = scores[order], position[order], payload[order]
        top = top_of(scores, self._count)
        self._parts = [(scores[top], position[top], payload[top])]
        self._kept = top.numel()
        if self._kept >= self._count > 0:
            self.bound = scores[top].min()


def offsets_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the position of each tensor's first entry when all are laid one after the other."""
    starts = itertools.accumulate(sizes.values(), initial=0)
    return dict(zip(sizes, starts, strict=False))


def top_overall(scores: Iterable[tuple[str, Tensor]], sizes: Mapping[str, int], total: int) -> dict[str, Tensor]:
    """Returns the positions, int64 ascending by tensor, of the ``total`` highest scores of all tensors together."""
    top = TopEntries(offsets_of(sizes), total)
    for name, score in scores:
        top.add(name, score, score)
    chosen, _ = top.result()
    return {name: index for name, (index, _) in chosen.items()}


def top_per_tensor(scores: Iterable[tuple[str, Tensor]], quotas: Mapping[str, int]) -> dict[str, Tensor]:
    """Returns of each tensor the positions, int64 ascending, of its quota of highest scores."""
    return {name: top_of(score, quotas[name]) for name, score in scores}


def even_quotas(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Returns how many of ``total`` fall to each tensor, in proportion to its size; the sum is exact."""
    whole, before = sum(sizes.values()), 0
    quotas = {}
    for name, size in sizes.items():
        quotas[name] = total * (before + size) // whole - total * before // whole
        before += size
    return quotas


def random_entries(sizes: Mapping[str, int], total: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns ``total`` distinct entries drawn uniformly over all tensors, as positions int64 ascending by tensor.

    Memory is O(total). Drawing with replacement and keeping the first ``total`` distinct ones is drawing without.
    """
    whole = sum(sizes.values())
    if 2 * total > whole:
        left_out = torch.zeros(whole, dtype=torch.bool)
        left_out[_distinct(whole, whole - total, generator)] = True
        drawn = (~left_out).nonzero().reshape(-1)
    else:
        drawn = _distinct(whole, total, generator).sort().values
    chosen, start = {}, 0
    for name, size in sizes.items():
        low, high = torch.searchsorted(drawn, torch.tensor([start, start + size])).tolist()
        chosen[name] = drawn[low:high] - start
        start += size
    return chosen


def _distinct(whole: int, total: int, generator: torch.Generator) -> Tensor:
    drawn = torch.empty(0, dtype=torch.int64)
    while True:
        drawn = torch.cat([drawn, torch.randint(whole, (total + total // 2 + 16,), generator=generator)])
        ordered, origin = drawn.sort(stable=True)
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[1:] = ordered[1:] != ordered[:-1]
        kept = origin[first].sort().values
        if kept.numel() >= total:
            return drawn[kept[:total]]
