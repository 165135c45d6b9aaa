"""Which expert of each matrix a forward pass uses: known again when activations are computed again in the backward."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Draw", "ForwardCount", "current_draw", "drawing"]

_CHECKPOINT = "_gradient_checkpointing_func"


@dataclass(frozen=True)
class Draw:
    """One stochastic pass through the model.

    Attributes:
        seeds: Adapter -> seed.
        counts: Adapter -> training forwards before this one.
        number: Number of the pass within this forward.
    """

    seeds: Mapping[str, int]
    counts: Mapping[str, int]
    number: int

    def expert(self, adapter: str, matrix: str, experts: int) -> int:
        """Returns the expert of a matrix: uniform, and a function of nothing but what is named here."""
        key = f"{self.seeds[adapter]} {self.counts[adapter]} {self.number} {matrix}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % experts


class ForwardCount(nn.Module):
    """How many training forwards an adapter has seen.

    It is a part of the state dict, and so of every checkpoint, but no buffer: it stays on the host, where the draw is
    made, whatever device the model goes to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.value = 0

    def get_extra_state(self) -> Tensor:
        """Returns the count, int64 ()."""
        return torch.tensor(self.value)

    def set_extra_state(self, state: Tensor) -> None:
        """Goes on from a count."""
        self.value = int(state)


# A variable of the context is one of the thread: backward passes on several devices compute again side by side.
_CURRENT: ContextVar[Draw | None] = ContextVar("draw", default=None)


def current_draw() -> Draw | None:
    """Returns the stochastic pass that is under way, or that is being computed again; None outside of any."""
    return _CURRENT.get()


@contextmanager
def drawing(model: nn.Module, draw: Draw) -> Iterator[None]:
    """Makes ``draw`` the current one, now and whenever a part of what runs now is computed again.

    A backward pass computes parts of earlier forwards again, of the second pass of a step before the first; so what
    is to be computed again takes its draw along.

    Args:
        model: Its gradient checkpointing is that of transformers.
        draw: The pass that begins.
    """
    places = [module for module in model.modules() if _CHECKPOINT in module.__dict__]
    functions = [module.__dict__[_CHECKPOINT] for module in places]
    for module, function in zip(places, functions, strict=True):
        module.__dict__[_CHECKPOINT] = partial(_with_draw, function, draw)
    token = _CURRENT.set(draw)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        for module, function in zip(places, functions, strict=True):
            module.__dict__[_CHECKPOINT] = function


def _with_draw(checkpoint: Callable[..., Any], draw: Draw, function: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    return checkpoint(partial(_run, draw, function), *args, **kw)


def _run(draw: Draw, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _CURRENT.set(draw)
    try:
        return function(*args, **kwargs)
    finally:
        _CURRENT.reset(token)
