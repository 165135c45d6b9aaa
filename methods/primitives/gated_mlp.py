"""A gated feed-forward block that keeps its two branches for the backward pass, and not their product.

``y = (silu(g) * u) W^T + b`` with trained columns of W as in :mod:`finetune.methods.primitives.weight_slice`: the
product is computed again where its gradient is needed, which is in the trained columns only.
"""

# Legend: T tokens (all leading dimensions), F feed-forward width, M out_features, K trained columns

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.methods.primitives.projections import in_features
from finetune.methods.primitives.weight_slice import COLUMNS, WeightSlice, oriented_weight, slice_gradient

__all__ = ["can_fuse", "fuse_gated_mlp", "unfuse_gated_mlp"]

_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class _GatedDown(torch.autograd.Function):
    """Saves g and u (T x F each) and W by reference."""

    @staticmethod
    def forward(
        ctx: Any,
        gate_TF: Tensor,
        up_TF: Tensor,
        weight_MF: Tensor,
        columns_MK: Tensor,
        index_K: Tensor,
        bias_M: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(gate_TF, up_TF, weight_MF, index_K)
        ctx.columns_dtype = columns_MK.dtype
        return F.linear(F.silu(gate_TF) * up_TF, weight_MF, bias_M)

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None, None, None]:
        gate_TF, up_TF, weight_MF, index_K = ctx.saved_tensors
        grad_columns = grad_gate = grad_up = None
        if ctx.needs_input_grad[3]:
            product_TK = F.silu(gate_TF.index_select(-1, index_K)) * up_TF.index_select(-1, index_K)
            flat_TM = grad_TM.reshape(-1, grad_TM.shape[-1])
            grad_columns = slice_gradient(flat_TM, product_TK.reshape(len(flat_TM), -1)).to(ctx.columns_dtype)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            grad_TF = grad_TM @ weight_MF
            sigmoid_TF = torch.sigmoid(gate_TF)
            silu_TF = gate_TF * sigmoid_TF
            grad_up = grad_TF * silu_TF
            # silu' = s + g s (1 - s) = s + silu (1 - s)
            grad_gate = grad_TF * up_TF * (sigmoid_TF + silu_TF * (1 - sigmoid_TF))
        return grad_gate, grad_up, None, grad_columns, None, None


# torch does not annotate it.
_apply: Callable[..., Tensor] = _GatedDown.apply


def can_fuse(block: nn.Module) -> bool:
    """Returns whether ``block`` computes ``down_proj(silu(gate_proj(x)) * up_proj(x))`` with sliced columns.

    The names of the parts do not say so: some models clamp or scale the branches. The block is asked.
    """
    if {name for name, _ in block.named_children()} != _PARTS:
        return False
    down: Any = block.down_proj
    # transformers has a class of its own beside torch's.
    silu = type(block.act_fn).__name__ in ("SiLU", "SiLUActivation")
    return silu and isinstance(down, WeightSlice) and down.slice_axis == COLUMNS and _is_plainly_gated(block)


@torch.no_grad()
def _is_plainly_gated(block: Any) -> bool:
    weight = block.down_proj.weight
    if weight.is_meta:
        return True  # a dry run
    # Small and large inputs: a clamp shows in large ones only.
    ramp = torch.linspace(-1, 1, in_features(block.gate_proj), device=weight.device)
    x = (ramp * torch.tensor([[1.0], [1e2], [1e4]], device=weight.device)).to(weight.dtype)
    return torch.allclose(block(x), _Fused(block)(x), rtol=0, atol=0, equal_nan=True)


def fuse_gated_mlp(block: nn.Module) -> None:
    """Lets ``block``, which :func:`can_fuse` accepts, run its second half as one function."""
    block.forward = _Fused(block)


def unfuse_gated_mlp(block: nn.Module) -> None:
    """Gives ``block`` its own forward back."""
    if isinstance(block.__dict__.get("forward"), _Fused):
        del block.forward


class _Fused:
    """The forward of a block; an object, so that a model with it can be copied and pickled."""

    def __init__(self, block: nn.Module) -> None:
        self.block: Any = block

    def __call__(self, x: Tensor) -> Tensor:
        gate, up, down = self.block.gate_proj(x), self.block.up_proj(x), cast(WeightSlice, self.block.down_proj)
        weight, bias = oriented_weight(down), down.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            gate, up, weight = gate.to(dtype), up.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return _apply(gate, up, weight, down.trained, down.slice_index, bias)
