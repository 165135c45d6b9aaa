"""Brings the blocks of a model into memory as they are computed, for forward and backward passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from finetune.core.errors import CapabilityError
from finetune.offload.blocks import find_blocks
from finetune.offload.files import WeightFiles
from finetune.offload.ring import Ring

__all__ = ["BlockStreamer", "Traffic"]

_ALIGNMENT = 64
"""Bytes that a tensor's place in a buffer is a multiple of, as torch's own allocations are."""


@dataclass(frozen=True)
class Traffic:
    """What streaming took so far.

    Attributes:
        bytes: Bytes that were read.
        seconds: Seconds that reading them took.
        waited: Seconds of these in which nothing was computed.
    """

    bytes: int
    seconds: float
    waited: float

    @property
    def overlap(self) -> float:
        """Share of the reading that went on while something was computed, in [0, 1]; 1 where nothing was read."""
        return 1 - min(1.0, self.waited / self.seconds) if self.seconds else 1.0


@dataclass(frozen=True)
class _Streamed:
    """A parameter of a block, and where it lies in the block's buffer."""

    parameter: nn.Parameter
    name: str
    at_rest: Tensor
    start: int

    def bind(self, buffer: Tensor) -> None:
        size = self.at_rest.numel() * self.at_rest.element_size()
        view = buffer[self.start : self.start + size].view(self.at_rest.dtype)
        self.parameter.data = view.view(self.at_rest.shape)


class BlockStreamer:
    """Keeps the blocks of a model on disk: one computes while the next one is read.

    Every parameter of a block is a view of its file, which costs no memory of the process; while the block computes
    it is a view of a buffer. ``disk`` reads into ``slots`` buffers of the largest block's size, so that many bytes and
    no more are taken; ``mmap`` computes from the views themselves, and the system decides which pages stay.

    Where gradients are wanted a block keeps its inputs alone and is computed again in the backward pass: what autograd
    would keep are views of buffers that other blocks take over. So the weights of the blocks can be frozen only, and
    nothing is ever written to the files.

    Args:
        model: A transformers model whose parameters are views of ``files``.
        files: Its weights.
        source: Where blocks are computed from.
        slots: Buffers of ``disk``, at least 2.
    """

    def __init__(
        self, model: nn.Module, files: WeightFiles, *, source: Literal["disk", "mmap"] = "disk", slots: int = 2
    ) -> None:
        self._model, self._files = model, files
        blocks = find_blocks(model)
        self._blocks = list(blocks.values())
        self._streamed = [_layout(name, block) for name, block in blocks.items()]
        self.block_bytes = max(_size(block) for block in self._streamed)
        self.slots = slots
        self._ring = Ring(self._read, self._release, size=self.block_bytes, slots=slots) if source == "disk" else None
        for number, block in enumerate(self._blocks):
            block.forward = _Forward(self, number, block)
        config: Any = model.config
        # The cache of a forward pass would be appended to again where the pass is repeated.
        self._use_cache, config.use_cache = config.use_cache, False

    @property
    def streamed_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(streamed.at_rest.nbytes for block in self._streamed for streamed in block)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the buffers."""
        return self.slots * self.block_bytes if self._ring is not None else 0

    @property
    def recomputes(self) -> bool:
        """Whether blocks are computed again in the backward pass."""
        return self._ring is not None

    def traffic(self) -> Traffic:
        """Returns what was read so far; of ``mmap`` the system does not tell."""
        ring = self._ring
        return Traffic(ring.bytes, ring.spent, ring.waited) if ring is not None else Traffic(0, 0.0, 0.0)

    def remove(self) -> None:
        """Makes the blocks plain, their parameters views of the files."""
        for block in self._blocks:
            block.__dict__.pop("forward", None)
        if self._ring is not None:
            self._ring.close()
        self._files.close()
        config: Any = self._model.config
        config.use_cache = self._use_cache

    def enter(self, number: int, *, again: bool) -> None:
        """Has a block's weights in place, and the next one's on their way.

        Args:
            number: Of the block.
            again: Whether it is computed again, in the backward pass.
        """
        following = max(0, number - 1) if again else (number + 1) % len(self._blocks)
        if not again and following == 0 and torch.is_grad_enabled():
            following = number  # the backward pass begins where this one ends
        if self._ring is None:
            self._files.announce(streamed.name for streamed in self._streamed[following])
            return
        buffer = self._ring.acquire(number)
        for streamed in self._streamed[number]:
            streamed.bind(buffer)
        self._ring.prefetch(following)

    def _read(self, number: int, buffer: Tensor) -> int:
        read = 0
        for streamed in self._streamed[number]:
            size = streamed.at_rest.nbytes
            self._files.read(streamed.name, buffer[streamed.start : streamed.start + size])
            read += size
        return read

    def _release(self, number: int) -> None:
        for streamed in self._streamed[number]:
            streamed.parameter.data = streamed.at_rest


class _Forward:
    """Stands in for a block's forward."""

    def __init__(self, streamer: BlockStreamer, number: int, block: nn.Module) -> None:
        self._streamer, self._number, self._own = streamer, number, block.forward
        functools.update_wrapper(self, block.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the block does."""
        if not (self._streamer.recomputes and torch.is_grad_enabled()):
            self._streamer.enter(self._number, again=False)
            return self._own(*args, **kwargs)
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            raise CapabilityError(
                "a streamed block is computed again in the backward pass, and would be put into the cache twice",
                where="use_cache",
                fix="model(..., use_cache=False)",
            )
        return checkpoint(_Passes(self._streamer, self._number, self._own), *args, use_reentrant=False, **kwargs)


class _Passes:
    """A block's forward that knows whether it runs for the first time."""

    def __init__(self, streamer: BlockStreamer, number: int, own: Callable[..., Any]) -> None:
        self._streamer, self._number, self._own = streamer, number, own
        self._first: Context | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._streamer.enter(self._number, again=self._first is not None)
        if self._first is None:
            # What layers ask of the pass that they are in (the task of each row, say) holds when it is repeated.
            self._first = copy_context()
            return self._own(*args, **kwargs)
        return self._first.run(self._own, *args, **kwargs)


def _layout(name: str, block: nn.Module) -> list[_Streamed]:
    streamed, start = [], 0
    for inner, parameter in block.named_parameters():
        streamed.append(_Streamed(parameter, f"{name}.{inner}", parameter.detach(), start))
        start += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    return streamed


def _size(block: list[_Streamed]) -> int:
    return block[-1].start + block[-1].at_rest.nbytes if block else 0
