"""Runs something before or after every optimizer step on given parameters, whatever the optimizer and the loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["after_optimizer_step", "before_optimizer_step"]


Parameters = Iterable[nn.Parameter] | Callable[[], Iterable[nn.Parameter]]
"""Parameters, or a bound method that returns them, where a wrapper (FSDP2) may put others in their place."""


def before_optimizer_step(parameters: Parameters, action: Callable[[Optimizer], None]) -> RemovableHandle:
    """Calls the bound method ``action`` before each step of an optimizer that holds any of ``parameters``."""
    return _hook(register_optimizer_step_pre_hook, parameters, action)


def after_optimizer_step(parameters: Parameters, action: Callable[[Optimizer], None]) -> RemovableHandle:
    """Calls the bound method ``action`` after each step of an optimizer that holds any of ``parameters``.

    A hook on the step rather than a look at the tensors' version counters: fused AdamW does not advance those. The hook
    is on all optimizers because the one that will train does not exist yet; it goes when the method's owner goes.
    """
    return _hook(register_optimizer_step_post_hook, parameters, action)


def _hook(register: Any, parameters: Parameters, action: Callable[[Optimizer], None]) -> RemovableHandle:
    weak_parameters = weakref.WeakMethod(parameters) if callable(parameters) else None
    constant = frozenset() if callable(parameters) else frozenset(map(id, parameters))
    weak_action = weakref.WeakMethod(action)

    def wanted() -> frozenset[int]:
        now = None if weak_parameters is None else weak_parameters()
        return constant if now is None else frozenset(map(id, now()))

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alive, ours = weak_action(), wanted()
        if alive is not None and any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            alive(optimizer)

    handle: RemovableHandle = register(hook)
    weakref.finalize(action.__self__, handle.remove)  # type: ignore[attr-defined]
    return handle
