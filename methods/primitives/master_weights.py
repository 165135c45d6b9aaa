"""Float32 parameters that a forward pass uses in 16 bit: masters of weights that train whole, and adapters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["AutocastForward", "autocast_adapters", "cast_in_place", "widen"]


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


def autocast_adapters(model: nn.Module, dtype: torch.dtype) -> AutocastForward | None:
    """Makes PEFT's layers compute in ``dtype``, their base's, whatever the dtype of their parameters.

    PEFT itself widens the input to the adapter's dtype, and everything between stays wide until the backward pass.

    Args:
        model: A ``PeftModel``.
        dtype: The base's.

    Returns:
        What takes it back; None where there is nothing to narrow: a float32 base, or a tuner without layers.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if dtype not in (torch.bfloat16, torch.float16):
        return None
    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    return AutocastForward(layers, dtype) if layers else None


class AutocastForward:
    """Puts every forward pass of some modules under autocast, until :meth:`remove`.

    Args:
        modules: The whole model, or parts of it.
        dtype: Dtype of the matrix products.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._contexts: list[torch.autocast] = []
        self._handles: list[RemovableHandle] = []
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._exit, always_call=True))

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
