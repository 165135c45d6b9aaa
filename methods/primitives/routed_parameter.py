"""Modules of which a parameter is read as an alias of itself, whose backward sends the gradient somewhere else.

The class of a module changes, as ``torch.nn.utils.parametrize`` does it: names, tensors, ``state_dict`` keys and every
reference to the module stay.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["Holder", "Route", "Routed", "holders_of", "route_parameter", "unroute"]

Holder = tuple[nn.Module, str]
"""A module, and the name under which it holds a parameter."""


class Route(Protocol):
    """Where the gradient of a parameter goes."""

    def alias(self, parameter: nn.Parameter) -> Tensor:
        """Returns the parameter's values, as a node of the graph that takes their gradient."""


class Routed(nn.Module):
    """What :func:`route_parameter` adds to a module's class.

    Attributes:
        routes: Name of a parameter of the module -> where its gradient goes.
        plain: The class that the module had.
    """

    routes: dict[str, Route]
    plain: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        mixin = type(self).__bases__[0]
        return _empty, (self.plain, tuple(self.routes), mixin), self.__dict__


def route_parameter(module: nn.Module, name: str, route: Route, *, mixin: type[Routed] = Routed) -> None:
    """Makes reads of the parameter ``name`` of ``module``, where gradients are on, go through ``route``.

    Args:
        module: Plain, or routed already.
        name: Its name in the module.
        route: Where its gradient goes.
        mixin: What is put before the module's class, where the module knows more than its parameter's gradient.
    """
    if not isinstance(module, Routed):
        module.routes = {}  # type: ignore[assignment]
    routed = cast(Routed, module)
    routed.routes[name] = route
    plain: Any = getattr(module, "plain", type(module))
    hashable: Any = mixin  # mypy takes the hash of modules for that of their classes
    module.__class__ = _routed_class(plain, tuple(routed.routes), hashable)


def unroute(module: nn.Module) -> None:
    """Makes ``module`` plain again; without effect on one that is."""
    if isinstance(module, Routed):
        plain = module.plain
        del module.routes
        module.__class__ = plain  # type: ignore[assignment]


def holders_of(model: nn.Module) -> dict[int, list[Holder]]:
    """Returns by the id of a parameter the modules that hold it, in order."""
    found: dict[int, list[Holder]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, name))
    return found


@functools.cache
def _routed_class(plain: Any, names: tuple[str, ...], mixin: Any) -> type[nn.Module]:
    reads = {name: property(functools.partial(_read, name=name)) for name in names}
    return type(f"Routed{plain.__name__}", (mixin, plain), {"plain": plain, "__module__": __name__, **reads})


def _read(module: Any, *, name: str) -> Tensor:
    parameter = cast(nn.Parameter, module._parameters[name])
    # FSDP2 looks at its shards between forward passes, and has to find the parameter itself.
    if not torch.is_grad_enabled() or isinstance(parameter, DTensor):
        return parameter
    alias: Any = module.routes[name].alias(parameter)
    # To whoever asks, as Module.get_parameter does, it is the parameter: it has its storage.
    alias._is_param = True
    return cast(Tensor, alias)


def _empty(plain: Any, names: tuple[str, ...], mixin: Any) -> nn.Module:
    routed = _routed_class(plain, names, mixin)
    return routed.__new__(routed)
