"""Float32 parameters that a forward pass uses in 16 bit: masters of weights that train whole, and adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

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

    The module's own ``forward`` is wrapped: a context that one hook enters and another leaves cannot be compiled.

    Args:
        modules: The whole model, or parts of it.
        dtype: Dtype of the matrix products.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._before: list[tuple[nn.Module, Any, Any]] = []
        for module in modules:
            set_on_instance, inner = module.__dict__.get("forward"), module.forward
            # A partial, unlike a closure, is copied and pickled with its module.
            module.forward = update_wrapper(partial(_narrow, module, inner, dtype), inner)
            self._before.append((module, module.forward, set_on_instance))

    def remove(self) -> None:
        """Gives the modules their own forward back, where nobody has wrapped it since."""
        for module, wrapped, set_on_instance in self._before:
            if module.__dict__.get("forward") is wrapped:
                del module.forward
                if set_on_instance is not None:
                    module.forward = set_on_instance
        self._before.clear()


def _narrow(module: nn.Module, inner: Callable[..., Any], dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(next(module.parameters()).device.type, dtype):
        return inner(*args, **kwargs)
