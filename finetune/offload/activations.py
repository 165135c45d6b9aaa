"""Activations wait elsewhere between the forward and the backward pass: on disk, or in the CPU's memory.

Autograd hands every tensor that it keeps to a pair of hooks (``torch.autograd.graph.saved_tensors_hooks``). A tensor of
some size that is no weight is put away, its storage once however many operations keep it or views of it, and comes back
bit for bit. Small tensors and weights stay where they are.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from finetune.offload.spill import SpillFile

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage, nn

__all__ = ["SMALLEST", "OffloadedActivations"]

SMALLEST = 1 << 16
"""Bytes below which a tensor is not worth the way."""


class _Away(Protocol):
    """Something that was put away and comes back."""

    def fetch(self) -> UntypedStorage:
        """Returns what was put away."""
        ...


class OffloadedActivations:
    """Puts away what the passes in its context keep for backward.

    Args:
        model: Its parameters and buffers are not put away.
        place: ``disk``, where the CPU computes; ``cpu``, where an accelerator does.
        folder: Where the file of ``disk`` lies, which has no name and is gone with the process.

    Attributes:
        bytes_away: Bytes put away so far.
    """

    def __init__(self, model: nn.Module, place: Literal["cpu", "disk"], folder: Path) -> None:
        self._model = model
        self._file = SpillFile(folder) if place == "disk" else None
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._alive: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self.bytes_away = 0

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Surrounds a forward pass; the backward pass may come later, and stays outside, with what it computes anew."""
        weights = [*self._model.parameters(), *self._model.buffers()]
        self._weights = {tensor.untyped_storage()._cdata for tensor in weights}
        self._kept = {}
        if self._file is not None and not self._alive:
            self._file.rewind()
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def close(self) -> None:
        """Gives the file back."""
        if self._file is not None:
            self._file.close()

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        if type(tensor) is not torch.Tensor or tensor.numel() * tensor.element_size() < SMALLEST:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._weights:
            return tensor
        key = (storage._cdata, tensor._version)
        kept = self._kept.get(key)
        if kept is None:
            away: _Away = _InHost(storage) if self._file is None else self._file.put(tensor)
            kept = self._kept[key] = _Kept(away, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            self._alive.add(kept)
            self.bytes_away += storage.nbytes()
        kept.views += 1
        return _View(kept, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())


@dataclass(eq=False)
class _Kept:
    """A storage that is away. While the weak reference lives, no other storage gets its address."""

    away: _Away
    reference: StorageWeakRef
    views: int = 0
    storage: UntypedStorage | None = field(default=None, repr=False)

    def fetch(self) -> UntypedStorage:
        """Returns the storage; the last view that asks for it takes it along."""
        storage = self.away.fetch() if self.storage is None else self.storage
        self.views -= 1
        self.storage = storage if self.views > 0 else None
        return storage


@dataclass(frozen=True, eq=False)
class _View:
    """What autograd holds in place of a tensor."""

    kept: _Kept
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    storage = packed.kept.fetch()
    whole = torch.empty(0, dtype=packed.dtype, device=storage.device)
    return whole.set_(storage, packed.offset, packed.size, packed.stride)


class _InHost:
    """A storage of an accelerator, copied to pinned memory in the order of its stream: nothing waits for the host."""

    def __init__(self, storage: UntypedStorage) -> None:
        self._device = storage.device
        self._host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
        self._host.copy_(_bytes(storage), non_blocking=True)

    def fetch(self) -> UntypedStorage:
        """Returns a copy on the accelerator."""
        return self._host.to(self._device, non_blocking=True, copy=True).untyped_storage()


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
