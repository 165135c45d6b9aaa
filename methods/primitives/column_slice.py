"""A linear layer of which some input columns train, in place.

The frozen weight stays what the forward multiplies with; the trained columns are a compact float32 parameter that the
forward only routes gradients to. After every optimizer step :meth:`ColumnSlice.write` rounds them into the weight.
"""

# Legend: T tokens (all leading dimensions), N in_features, M out_features, K trained columns

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

__all__ = ["ColumnSlice", "can_slice", "oriented_weight", "slice_columns", "unslice_columns"]


class _SlicedLinear(torch.autograd.Function):
    """``y = x W^T + b`` whose backward forms the gradient of the trained columns of W only.

    Saves ``x[..., index]`` (T x K) and W by reference: never the whole input (S2FT, arXiv 2412.06289, section 3).
    """

    @staticmethod
    def forward(
        ctx: Any, x_TN: Tensor, weight_MN: Tensor, columns_MK: Tensor, index_K: Tensor, bias_M: Tensor | None
    ) -> Tensor:
        selected = x_TN.index_select(-1, index_K) if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(weight_MN, selected)
        ctx.columns_dtype = columns_MK.dtype
        return F.linear(x_TN, weight_MN, bias_M)

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        weight_MN, selected_TK = ctx.saved_tensors
        grad_x = grad_TM @ weight_MN if ctx.needs_input_grad[0] else None
        grad_columns = None
        if selected_TK is not None:
            flat_TM = grad_TM.reshape(-1, grad_TM.shape[-1])
            grad_columns = (flat_TM.t() @ selected_TK.reshape(-1, selected_TK.shape[-1])).to(ctx.columns_dtype)
        return grad_x, None, grad_columns, None, None


# torch does not annotate it.
_apply: Callable[..., Any] = _SlicedLinear.apply


class ColumnSlice(nn.Module):
    """What :func:`slice_columns` adds to a layer's class; names and tensors of the layer stay those of the base.

    Attributes:
        columns: Trained values of the selected columns, float32 (M, K); the master of a 16-bit weight.
        column_index: Selected columns, int64 (K,), ascending.
        column_base: The base's values of these columns, (M, K) in the weight's dtype.
        column_axis: The axis of the stored weight that the columns lie on.
    """

    columns: nn.Parameter
    column_index: Tensor
    column_base: Tensor
    column_axis: ClassVar[int]
    plain: ClassVar[type[nn.Module]]
    weight: Any
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x W^T + b`` in the layer's dtype, or the autocast dtype where autocast is on."""
        weight, bias = oriented_weight(self), self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return cast(Tensor, _apply(x, weight, self.columns, self.column_index, bias))

    @torch.no_grad()
    def write(self) -> None:
        """Rounds the trained columns into the weight.

        An ordinary in-place operation on purpose: between a forward and its backward autograd then raises, where a
        write through ``.data`` would give wrong gradients silently.
        """
        weight = oriented_weight(self)
        weight.index_copy_(1, self.column_index, self.columns.to(weight.dtype))

    @torch.no_grad()
    def select(self, index: Tensor, columns: Tensor | None = None) -> None:
        """Gives the current columns their base values back; trains ``index`` (K,) instead, from ``columns`` (M, K)."""
        weight = oriented_weight(self)
        weight.index_copy_(1, self.column_index, self.column_base)
        self.column_index.copy_(index)
        self.column_base.copy_(weight.index_select(1, self.column_index))
        self.columns.copy_(self.column_base if columns is None else columns)
        self.write()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # The weight holds the columns already: a saved model has the base's keys and loads without this package.
        destination.pop(prefix + "columns")

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        if prefix + "columns" in missing_keys:
            missing_keys.remove(prefix + "columns")
            with torch.no_grad():
                self.columns.copy_(oriented_weight(self).index_select(1, self.column_index))


class _SlicedLinearLayer(ColumnSlice, nn.Linear):
    column_axis = 1
    plain = nn.Linear


class _SlicedConv1DLayer(ColumnSlice, Conv1D):
    column_axis = 0
    plain = Conv1D


_SLICED: dict[type[nn.Module], type[ColumnSlice]] = {nn.Linear: _SlicedLinearLayer, Conv1D: _SlicedConv1DLayer}


def can_slice(layer: nn.Module) -> bool:
    """Returns whether ``layer`` is a plain ``nn.Linear`` or ``Conv1D``: not quantised, not adapted."""
    return type(layer) in _SLICED


def oriented_weight(layer: nn.Module) -> Tensor:
    """Returns the weight of a linear layer as (out_features, in_features); a view."""
    weight = cast(Tensor, layer.weight)
    return weight.t() if isinstance(layer, Conv1D) else weight


def slice_columns(layer: nn.Module, index: Tensor) -> ColumnSlice:
    """Makes the input columns ``index`` of a frozen layer trainable and returns the same object.

    The class of the object changes, as ``torch.nn.utils.parametrize`` does it, so every reference to it stays right.

    Args:
        layer: A layer that :func:`can_slice` accepts.
        index: Distinct columns, int64 (K,).
    """
    layer.__class__ = _SLICED[type(layer)]
    sliced = cast(ColumnSlice, layer)
    weight = oriented_weight(sliced).detach()
    index = index.sort().values.to(weight.device)
    base = weight.index_select(1, index)
    sliced.columns = nn.Parameter(base.to(torch.float32, copy=True))
    sliced.register_buffer("column_index", index, persistent=False)
    sliced.register_buffer("column_base", base, persistent=False)
    return sliced


def unslice_columns(layer: ColumnSlice) -> nn.Module:
    """Makes ``layer`` the plain layer again; its weight keeps the trained columns."""
    del layer.columns, layer.column_index, layer.column_base
    layer.__class__ = layer.plain  # type: ignore[assignment]
    return layer
