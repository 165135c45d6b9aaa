"""A file without a name that tensors are written to, and read from, in the background."""

from __future__ import annotations

import collections
import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage

__all__ = ["IN_FLIGHT", "SpillFile", "Spilled"]

IN_FLIGHT = 1 << 26
"""Bytes that may wait to be written."""
_AHEAD = 2
"""Tensors that are read before they are asked for."""


class SpillFile:
    """Tensors one after the other; they come back in the opposite order, as a backward pass asks for them.

    Args:
        folder: On the disk that holds it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as this object
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="spill")
        self._unwritten: collections.deque[Spilled] = collections.deque()
        self._order: list[Spilled] = []
        self._end = 0

    def rewind(self) -> None:
        """Begins anew: nothing that was put away is wanted any more."""
        self._order, self._end = [], 0

    def put(self, tensor: Tensor) -> Spilled:
        """Writes the storage of a tensor, and waits only where too much is under way.

        Raises:
            OSError: The disk is full.
        """
        size = tensor.untyped_storage().nbytes()
        written = self._worker.submit(self._write, tensor.detach(), tensor._version, self._end)
        spilled = Spilled(self, len(self._order), self._end, size, written)
        self._order.append(spilled)
        self._end += size
        self._unwritten.append(spilled)
        while self._unwritten and (self._unwritten[0].written.done() or self._waiting() > IN_FLIGHT):
            self._unwritten.popleft().written.result()
        return spilled

    def fetch(self, spilled: Spilled) -> UntypedStorage:
        """Returns what was written, and begins to read what is likely to be asked for next.

        Raises:
            OSError: The disk is full.
            RuntimeError: The tensor was changed while it was being written.
        """
        spilled.written.result()
        reading = spilled.reading or self._worker.submit(self._read, spilled)
        spilled.reading, spilled.fetched = None, True
        for earlier in reversed(self._order[max(0, spilled.place - _AHEAD) : spilled.place]):
            if earlier.reading is None and not earlier.fetched:
                earlier.reading = self._worker.submit(self._read, earlier)
        return reading.result()

    def close(self) -> None:
        """Waits for what is under way and gives the disk's room back."""
        self._worker.shutdown()
        self._file.close()

    def _waiting(self) -> int:
        return sum(spilled.size for spilled in self._unwritten)

    def _write(self, tensor: Tensor, version: int, offset: int) -> None:
        rest = _view(tensor.untyped_storage())
        while rest:
            try:
                done = os.pwrite(self._file.fileno(), rest, offset)
            except OSError as error:  # of a file without a name it does not say where
                raise OSError(error.errno, error.strerror, str(self._folder)) from error
            rest, offset = rest[done:], offset + done
        if tensor._version != version:
            raise RuntimeError("a tensor that the backward pass needs was changed in place while it was put away")

    def _read(self, spilled: Spilled) -> UntypedStorage:
        storage = torch.empty(spilled.size, dtype=torch.uint8).untyped_storage()
        rest, offset = _view(storage), spilled.offset
        while rest:
            done = os.preadv(self._file.fileno(), [rest], offset)
            rest, offset = rest[done:], offset + done
        return storage


@dataclass(eq=False)
class Spilled:
    """A storage in a file: ``size`` bytes at ``offset``, the ``place``-th one that was put there."""

    file: SpillFile = field(repr=False)
    place: int
    offset: int
    size: int
    written: Future[None]
    reading: Future[UntypedStorage] | None = None
    fetched: bool = False

    def fetch(self) -> UntypedStorage:
        """Returns a storage with the same bytes."""
        return self.file.fetch(self)


def _view(storage: UntypedStorage) -> memoryview:
    return memoryview(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())  # type: ignore[arg-type]
