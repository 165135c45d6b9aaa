"""Modules whose chosen entries train: the weight stays where it is, its gradient goes to the pool of entries.

The class of a module changes, as ``torch.nn.utils.parametrize`` does it: names, tensors and ``state_dict`` keys stay.
A ``nn.Linear`` computes the entries' gradient itself, the fastest way; every other parameter (embeddings, norms,
``Conv1D``, the 3-D experts of a mixture) reads in a forward pass as an alias whose backward hands the dense gradient
over and drops it. Either way no ``weight.grad`` ever exists, and one dense gradient is alive at a time.
"""

# Legend: T tokens (all leading dimensions), N in_features, M out_features

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from finetune.methods.primitives.entry_pool import EntryTensor

__all__ = ["route_entries", "unroute_entries"]


class _Alias(torch.autograd.Function):
    """The weight itself; the backward hands its dense gradient to the pool."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, token: Tensor, entries: EntryTensor) -> Tensor:
        ctx.entries = entries
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        ctx.entries.receive(grad)
        # The edge to the token, not its value, is what makes the pool's own backward wait for this one.
        return None, grad.new_zeros((), dtype=torch.float32), None


class _Linear(torch.autograd.Function):
    """``y = x W^T + b`` whose backward lets the pool form the gradient of the chosen entries of W."""

    @staticmethod
    def forward(
        ctx: Any, x_TN: Tensor, weight_MN: Tensor, bias_M: Tensor | None, token: Tensor, entries: EntryTensor
    ) -> Tensor:
        ctx.save_for_backward(x_TN, weight_MN)
        ctx.entries = entries
        return F.linear(x_TN, weight_MN, bias_M)

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor, None]:
        x_TN, weight_MN = ctx.saved_tensors
        flat_TM = grad_TM.reshape(-1, grad_TM.shape[-1])
        ctx.entries.receive_factors(flat_TM, x_TN.reshape(-1, x_TN.shape[-1]))
        grad_x = grad_TM @ weight_MN if ctx.needs_input_grad[0] else None
        grad_bias = flat_TM.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, grad_TM.new_zeros((), dtype=torch.float32), None


# torch does not annotate them.
_alias: Callable[..., Tensor] = _Alias.apply
_linear: Callable[..., Tensor] = _Linear.apply


class _Routed(nn.Module):
    """What :func:`route_entries` adds to a module's class.

    Attributes:
        routed_entries: Name of a parameter of the module -> its chosen entries.
        plain: The class that the module had.
    """

    routed_entries: dict[str, EntryTensor]
    plain: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (self.plain, tuple(self.routed_entries)), self.__dict__


class _RoutedLinear(_Routed):
    """A ``nn.Linear``: its weight need not be aliased, as the layer itself knows both factors of the gradient."""

    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x W^T + b`` in the layer's dtype, or the autocast dtype where autocast is on."""
        entries = self.routed_entries.get("weight")
        if entries is None or not torch.is_grad_enabled():
            return cast(Tensor, super().forward(x))
        weight, bias = cast(Tensor, self._parameters["weight"]), self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return _linear(x, weight, bias, entries.pool.token(), entries)


def route_entries(module: nn.Module, name: str, entries: EntryTensor) -> None:
    """Makes reads of the parameter ``name`` of ``module`` in a forward pass send their gradient to ``entries``."""
    if not isinstance(module, _Routed):
        module.routed_entries = {}  # type: ignore[assignment]
    routed = cast(_Routed, module)
    routed.routed_entries[name] = entries
    plain: Any = getattr(module, "plain", type(module))
    module.__class__ = _routed_class(plain, tuple(routed.routed_entries))


def unroute_entries(module: nn.Module) -> None:
    """Makes ``module`` plain again; without effect on one that is."""
    if isinstance(module, _Routed):
        plain = module.plain
        del module.routed_entries
        module.__class__ = plain  # type: ignore[assignment]


@functools.cache
def _routed_class(plain: Any, names: tuple[str, ...]) -> type[nn.Module]:
    mixin = _RoutedLinear if plain is nn.Linear else _Routed
    reads = {name: property(functools.partial(_read, name=name)) for name in names}
    return type(f"Routed{plain.__name__}", (mixin, plain), {"plain": plain, "__module__": __name__, **reads})


def _read(module: Any, *, name: str) -> Tensor:
    parameter = cast(Tensor, module._parameters[name])
    if not torch.is_grad_enabled():
        return parameter
    entries: EntryTensor = module.routed_entries[name]
    alias: Any = _alias(parameter, entries.pool.token(), entries)
    # To whoever asks, as Module.get_parameter does, it is the parameter: it has its storage.
    alias._is_param = True
    return cast(Tensor, alias)


def _empty(plain: Any, names: tuple[str, ...]) -> nn.Module:
    routed = _routed_class(plain, names)
    return routed.__new__(routed)
