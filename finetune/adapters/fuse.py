"""Several learned states of one base as one: the weighted sum of their changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.adapters.learned import LearnedTensor, read_learned, require_same_base
from finetune.core.errors import CheckpointError, ConfigError
from finetune.core.files import replaced_folder, require_empty
from finetune.core.learned_state import BASE, INDEX, VALUE, write_learned_state

__all__ = ["FUSED", "fuse"]

FUSED = "fused"
"""What the metadata call the method of a fused state."""


@dataclass(frozen=True)
class _Part:
    tensor: LearnedTensor
    weight: float


def fuse(adapters: Sequence[tuple[str | Path, float]], out: str | Path) -> Path:
    """Writes ``base + sum of w_i (value_i - base)`` over all positions that any adapter learned; returns ``out``.

    Sums are float32. A position that one adapter alone learned, with weight 1, keeps its value bit for bit. Slices
    along the same axis of a tensor stay slices; of mixed forms the result has single entries.

    Args:
        adapters: Folders of learned states with base values, each with its weight; at least two.
        out: Folder that does not exist or is empty; it appears whole or not at all.

    Raises:
        CapabilityError: A state has no base values.
        CheckpointError: The states belong to different bases.
        ConfigError: There are fewer than two, or a weight is not finite.
        RefusedError: ``out`` holds something.
    """
    require_empty(Path(out))
    if len(adapters) < 2:
        raise ConfigError("fusing takes at least two adapters", got=str(len(adapters)))
    for folder, weight in adapters:
        if not math.isfinite(weight):
            raise ConfigError("the weight of an adapter is not finite", where=str(folder), got=str(weight))
    learned = [(read_learned(folder), weight) for folder, weight in adapters]
    first = learned[0][0]
    for other, _ in learned[1:]:
        require_same_base(first, other)
    tensors: dict[str, Tensor] = {}
    axes: dict[str, int | None] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in sorted({name for one, _ in learned for name in one.tensors}):
        parts = [_Part(one.tensors[name], weight) for one, weight in learned if name in one.tensors]
        shapes[name] = parts[0].tensor.shape
        axes[name], index, value, base = _sum(parts)
        wide = math.prod(shapes[name]) >= 2**31
        tensors |= {f"{name}{INDEX}": index if wide else index.int(), f"{name}{VALUE}": value, f"{name}{BASE}": base}
    own = {key: first.metadata.get(key) for key in ("base_model", "base_fingerprint", "tied", "finetune_version")}
    sources = [{"folder": str(one.folder), "method": one.metadata["method"], "weight": w} for one, w in learned]
    form = {"axes": axes, "shapes": shapes}
    metadata: dict[str, Any] = {**own, "method": FUSED, "kind": "delta", "config": {"sources": sources}, **form}
    with replaced_folder(Path(out)) as beside:
        write_learned_state(beside, tensors, metadata)
    return Path(out)


def _sum(parts: Sequence[_Part]) -> tuple[int | None, Tensor, Tensor, Tensor]:
    """Returns axis, positions, values and base values of the sum, the positions last."""
    axes = {part.tensor.axis for part in parts}
    if len(axes) == 1:
        slices = [(part.tensor.index, part.tensor.value, part.tensor.base) for part in parts]
        return (axes.pop(), *_union(slices, [part.weight for part in parts]))
    entries = [part.tensor.entries() for part in parts]
    return (None, *_union(entries, [part.weight for part in parts]))


def _union(parts: Sequence[tuple[Tensor, Tensor, Tensor]], weights: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    index: Tensor = torch.unique(torch.cat([index for index, _, _ in parts]))
    leading, dtype = parts[0][2].shape[:-1], _widest([base for _, _, base in parts])
    base = torch.zeros(*leading, index.numel(), dtype=dtype)
    change = torch.zeros(*leading, index.numel())
    exact = torch.zeros(*leading, index.numel())
    owners = torch.zeros(index.numel())
    for (own, value, own_base), weight in zip(parts, weights, strict=True):
        place = torch.searchsorted(index, own)
        known = owners[place] > 0
        if not torch.equal(base[..., place[known]], own_base[..., known].to(dtype)):
            raise CheckpointError("the adapters disagree about what their base holds, so they belong to different ones")
        base[..., place] = own_base.to(dtype)
        change[..., place] += weight * (value - own_base.float())
        exact[..., place] = value
        owners[place] += 1 if weight == 1 else 2
    return index, torch.where(owners == 1, exact, base.float() + change), base


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
