"""Modules whose chosen entries train: the weight stays where it is, its gradient goes to the pool of entries.

A ``nn.Linear`` computes the entries' gradient itself, the fastest way; every other parameter (embeddings, norms,
``Conv1D``, the 3-D experts of a mixture) reads in a forward pass as an alias whose backward hands the dense gradient
over and drops it. Either way no ``weight.grad`` ever exists, and one dense gradient is alive at a time.
"""

# Legend: T tokens (all leading dimensions), N in_features, M out_features

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.methods.primitives.routed_parameter import Routed, route_parameter

if TYPE_CHECKING:
    from finetune.methods.primitives.entry_pool import EntryTensor

__all__ = ["entries_alias", "route_entries"]


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


class _RoutedLinear(Routed):
    """A ``nn.Linear``: its weight need not be aliased, as the layer itself knows both factors of the gradient."""

    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x W^T + b`` in the layer's dtype, or the autocast dtype where autocast is on."""
        entries = cast("EntryTensor | None", self.routes.get("weight"))
        if entries is None or not torch.is_grad_enabled():
            return cast(Tensor, super().forward(x))
        weight, bias = cast(Tensor, self._parameters["weight"]), self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return _linear(x, weight, bias, entries.pool.token(), entries)


def entries_alias(weight: Tensor, entries: EntryTensor) -> Tensor:
    """Returns ``weight`` as a node of the graph that hands its dense gradient to ``entries`` and drops it."""
    return _alias(weight, entries.pool.token(), entries)


def route_entries(module: nn.Module, name: str, entries: EntryTensor) -> None:
    """Makes reads of the parameter ``name`` of ``module`` in a forward pass send their gradient to ``entries``."""
    plain = getattr(module, "plain", type(module))
    route_parameter(module, name, entries, mixin=_RoutedLinear if plain is nn.Linear else Routed)
