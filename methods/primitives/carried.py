"""What layers ask of the forward pass that they are in, known again when their activations are computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn

__all__ = ["Carried"]

T = TypeVar("T")
_CHECKPOINT = "_gradient_checkpointing_func"


class Carried(Generic[T]):
    """A value that holds while a forward pass runs; made once per kind of value, at the top of a module.

    Args:
        name: For people who debug.
    """

    def __init__(self, name: str) -> None:
        # A variable of the context is one of the thread: backward passes on several devices compute again side by side.
        self._current: ContextVar[T | None] = ContextVar(name, default=None)

    def get(self) -> T | None:
        """Returns the value of the pass that is under way, or that is being computed again; None outside of any."""
        return self._current.get()

    @contextmanager
    def during(self, model: nn.Module, value: T) -> Iterator[None]:
        """Makes ``value`` the current one, now and whenever a part of what runs now is computed again.

        A backward pass computes parts of earlier forwards again, of the second forward of a step before the first; so
        what is to be computed again takes its value along.

        Args:
            model: Its gradient checkpointing is that of transformers.
            value: What its layers ask for.
        """
        will_recompute = torch.is_grad_enabled()
        places = [module for module in model.modules() if will_recompute and _CHECKPOINT in module.__dict__]
        functions = [module.__dict__[_CHECKPOINT] for module in places]
        for module, function in zip(places, functions, strict=True):
            module.__dict__[_CHECKPOINT] = partial(self._checkpoint, function, value)
        token = self._current.set(value)
        try:
            yield
        finally:
            self._current.reset(token)
            for module, function in zip(places, functions, strict=True):
                module.__dict__[_CHECKPOINT] = function

    def _checkpoint(
        self, checkpoint: Callable[..., Any], value: T, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return checkpoint(partial(self._run, value, function), *args, **kwargs)

    def _run(self, value: T, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        token = self._current.set(value)
        try:
            return function(*args, **kwargs)
        finally:
            self._current.reset(token)
