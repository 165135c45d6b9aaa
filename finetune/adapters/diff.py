"""What two learned states have in common, and how far apart they are where they overlap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from finetune.adapters.learned import LearnedTensor, read_learned, require_same_base

__all__ = ["AdapterDiff", "TensorDiff", "diff"]


@dataclass(frozen=True)
class TensorDiff:
    """Two learned states in one base tensor.

    Attributes:
        name: Its name; empty for the total.
        only_first: Entries that only the first learned.
        only_second: Entries that only the second learned.
        both: Entries that both learned.
        largest: Largest |difference| of their values; 0 where they share none.
        mean: Mean of the same.
        first_norm: Euclidean norm of the first's change of the base.
        second_norm: That of the second's.
    """

    name: str
    only_first: int
    only_second: int
    both: int
    largest: float
    mean: float
    first_norm: float
    second_norm: float


@dataclass(frozen=True)
class AdapterDiff:
    """Two learned states.

    Attributes:
        tensors: Those that either learned, by name.
        total: The sum over them.
    """

    tensors: tuple[TensorDiff, ...]
    total: TensorDiff


def diff(first: str | Path, second: str | Path) -> AdapterDiff:
    """Compares two learned states with base values.

    Raises:
        CapabilityError: A state has no base values.
        CheckpointError: A state is missing or damaged, or they belong to different bases.
    """
    a, b = read_learned(first), read_learned(second)
    require_same_base(a, b)
    names = sorted(a.tensors.keys() | b.tensors.keys())
    tensors = tuple(_compare(name, a.tensors.get(name), b.tensors.get(name)) for name in names)
    both = sum(tensor.both for tensor in tensors)
    total = TensorDiff(
        name="",
        only_first=sum(tensor.only_first for tensor in tensors),
        only_second=sum(tensor.only_second for tensor in tensors),
        both=both,
        largest=max((tensor.largest for tensor in tensors), default=0.0),
        mean=sum(tensor.mean * tensor.both for tensor in tensors) / max(1, both),
        first_norm=sum(tensor.first_norm**2 for tensor in tensors) ** 0.5,
        second_norm=sum(tensor.second_norm**2 for tensor in tensors) ** 0.5,
    )
    return AdapterDiff(tensors, total)


def _compare(name: str, first: LearnedTensor | None, second: LearnedTensor | None) -> TensorDiff:
    sizes = [0 if tensor is None else tensor.value.numel() for tensor in (first, second)]
    norms = [0.0 if tensor is None else float(tensor.change.norm()) for tensor in (first, second)]
    both, largest, mean = 0, 0.0, 0.0
    if first is not None and second is not None:
        a_index, a_value, _ = first.entries()
        b_index, b_value, _ = second.entries()
        common = a_index[torch.isin(a_index, b_index)]
        both = common.numel()
        if both:
            gaps = a_value[torch.searchsorted(a_index, common)] - b_value[torch.searchsorted(b_index, common)]
            largest, mean = float(gaps.abs().max()), float(gaps.abs().mean())
    return TensorDiff(name, sizes[0] - both, sizes[1] - both, both, largest, mean, *norms)
