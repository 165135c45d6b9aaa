"""Float32 masters of 16-bit weights that train whole: the parameter itself becomes float32, the forward autocasts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["AutocastForward", "cast_in_place", "widen"]


def cast_in_place(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Changes the dtype of a parameter and of its gradient; every module that holds the parameter sees it."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def widen(parameters: Iterable[nn.Parameter]) -> torch.dtype | None:
    """Makes 16-bit parameters float32 and returns the dtype that they had, or None where there are none."""
    narrow = None
    for parameter in parameters:
        if parameter.dtype in (torch.bfloat16, torch.float16):
            narrow = parameter.dtype
            cast_in_place(parameter, torch.float32)
    return narrow


class AutocastForward:
    """Puts every forward pass of a module under autocast, until :meth:`remove`.

    Args:
        model: The whole model.
        dtype: Dtype of the matrix products.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._contexts: list[torch.autocast] = []
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._exit, always_call=True),
        ]

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        context = torch.autocast(next(module.parameters()).device.type, self._dtype)
        context.__enter__()  # type: ignore[no-untyped-call]
        self._contexts.append(context)

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        self._contexts.pop().__exit__(None, None, None)
