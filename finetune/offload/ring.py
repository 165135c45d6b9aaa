"""A few buffers that blocks take turns in, filled by a thread of their own while others compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

__all__ = ["Ring"]


class Ring:
    """Holds the blocks that were asked for last, and the one that is expected next.

    Args:
        read: Reads a block into a buffer, in a thread; returns the bytes.
        release: Called before a block's buffer is given to another one.
        size: Bytes of the largest block.
        slots: Buffers, at least 2.

    Attributes:
        waited: Seconds that the computation waited for reads.
        spent: Seconds that reads took.
        bytes: Bytes that were read.
    """

    def __init__(
        self, read: Callable[[int, Tensor], int], release: Callable[[int], None], *, size: int, slots: int
    ) -> None:
        self._read, self._release = read, release
        self._free = [torch.empty(size, dtype=torch.uint8) for _ in range(slots)]
        # Least recently asked for first: dicts keep their order.
        self._held: dict[int, tuple[Tensor, Future[None]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="finetune-blocks")
        self.waited = self.spent = 0.0
        self.bytes = 0

    def acquire(self, block: int) -> Tensor:
        """Returns the buffer that holds a block, which stays valid until other blocks have taken all buffers."""
        self.prefetch(block)
        buffer, reading = self._held[block] = self._held.pop(block)
        if not reading.done():
            started = time.perf_counter()
            try:
                reading.result()
            finally:
                self.waited += time.perf_counter() - started
        reading.result()
        return buffer

    def prefetch(self, block: int) -> None:
        """Begins to read a block that is not there, in the place of the one that was asked for longest ago."""
        if block in self._held:
            return
        if self._free:
            buffer = self._free.pop()
        else:
            oldest = next(iter(self._held))
            buffer, reading = self._held.pop(oldest)
            reading.exception()  # a buffer that is still written to is given to nobody
            self._release(oldest)
        self._held[block] = buffer, self._thread.submit(self._fill, block, buffer)

    def close(self) -> None:
        """Ends the thread and lets the buffers go."""
        self._thread.shutdown(cancel_futures=True)
        for block in list(self._held):
            del self._held[block]
            self._release(block)
        self._free.clear()

    def _fill(self, block: int, buffer: Tensor) -> None:
        started = time.perf_counter()
        self.bytes += self._read(block, buffer)
        self.spent += time.perf_counter() - started
