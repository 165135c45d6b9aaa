"""A linear layer of which some input columns or output rows train, in place.

The frozen weight stays what the forward multiplies with; the trained slice is a compact float32 parameter that the
forward only routes gradients to. After every optimizer step :meth:`WeightSlice.write` rounds it into the weight.
"""

# Legend: T tokens (all leading dimensions), N in_features, M out_features, K trained columns or rows

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from finetune.methods.primitives.sharding import own_rows, own_share, whole

__all__ = [
    "COLUMNS",
    "ROWS",
    "WeightSlice",
    "can_slice",
    "oriented_weight",
    "slice_gradient",
    "slice_weight",
    "stored_axis",
    "unslice_weight",
]

ROWS, COLUMNS = 0, 1
"""Axes of a weight as (out_features, in_features)."""


class _ColumnsTrain(torch.autograd.Function):
    """``y = x W^T + b`` whose backward forms the gradient of the trained columns of W only.

    Saves ``x[..., index]`` (T x K) and W by reference: never the whole input (S2FT, arXiv 2412.06289, section 3).
    """

    @staticmethod
    def forward(
        ctx: Any, x_TN: Tensor, weight_MN: Tensor, slice_MK: Tensor, index_K: Tensor, bias_M: Tensor | None
    ) -> Tensor:
        selected = x_TN.index_select(-1, index_K) if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(weight_MN, selected)
        ctx.slice_dtype = slice_MK.dtype
        return F.linear(x_TN, weight_MN, bias_M)

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        weight_MN, selected_TK = ctx.saved_tensors
        grad_x = grad_TM @ weight_MN if ctx.needs_input_grad[0] else None
        grad_slice = None
        if selected_TK is not None:
            grad_slice = slice_gradient(_flat(grad_TM), _flat(selected_TK)).to(ctx.slice_dtype)
        return grad_x, None, grad_slice, None, None


class _RowsTrain(torch.autograd.Function):
    """``y = x W^T + b`` whose backward forms the gradient of the trained rows of W only.

    Saves x, which layers that share their input keep once, and W by reference.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TN: Tensor, weight_MN: Tensor, slice_NK: Tensor, index_K: Tensor, bias_M: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(weight_MN, x_TN if ctx.needs_input_grad[2] else None, index_K)
        ctx.slice_dtype = slice_NK.dtype
        return F.linear(x_TN, weight_MN, bias_M)

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        weight_MN, x_TN, index_K = ctx.saved_tensors
        grad_x = grad_TM @ weight_MN if ctx.needs_input_grad[0] else None
        grad_slice = None
        if x_TN is not None:
            selected_TK = _flat(grad_TM).index_select(1, index_K)
            grad_slice = slice_gradient(_flat(x_TN), selected_TK).to(ctx.slice_dtype)
        return grad_x, None, grad_slice, None, None


def slice_gradient(wide_TM: Tensor, selected_TK: Tensor) -> Tensor:
    """Returns ``wide^T selected``, (M, K), as a view.

    The narrow factor is the one that is transposed: CPU kernels take up to seven times as long the other way round.
    """
    return (selected_TK.t() @ wide_TM).t()


# torch does not annotate them.
_APPLY: dict[int, Callable[..., Tensor]] = {COLUMNS: _ColumnsTrain.apply, ROWS: _RowsTrain.apply}
_PARAMETER = {COLUMNS: "columns", ROWS: "rows"}


class WeightSlice(nn.Module):
    """What :func:`slice_weight` adds to a layer's class; names and tensors of the layer stay those of the base.

    The trained parameter is called ``columns``, float32 (M, K), or ``rows``, float32 (N, K): the slice of the weight
    with its index last. It is the master of a 16-bit weight, or its change where weight decay is to pull to the base.

    Attributes:
        slice_index: The columns or rows, int64 (K,), ascending.
        slice_base: The base's values of them, shaped as the parameter, in the weight's dtype.
        slice_axis: :data:`ROWS` or :data:`COLUMNS`.
        to_base: Whether the parameter holds changes.
    """

    slice_index: Tensor
    slice_base: Tensor
    to_base: bool
    slice_axis: ClassVar[int]
    plain: ClassVar[type[nn.Module]]
    weight: Any
    bias: Any

    @property
    def trained(self) -> nn.Parameter:
        """The trained parameter."""
        return cast(nn.Parameter, getattr(self, _PARAMETER[self.slice_axis]))

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x W^T + b`` in the layer's dtype, or the autocast dtype where autocast is on."""
        weight, bias = oriented_weight(self), self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return _APPLY[self.slice_axis](x, weight, self.trained, self.slice_index, bias)

    def absolute(self) -> Tensor:
        """Returns the values of the slice, float32, shaped as the parameter."""
        trained = self.trained.detach()
        return trained + self.slice_base.float() if self.to_base else trained

    @torch.no_grad()
    def write(self) -> None:
        """Rounds the trained slice into the weight.

        An ordinary in-place operation on purpose: between a forward and its backward autograd then raises, where a
        write through ``.data`` would give wrong gradients silently.
        """
        self._put(self.absolute())

    @torch.no_grad()
    def select(self, index: Tensor, trained: Tensor | None = None) -> None:
        """Gives the current slice its base values back and trains that of ``index`` (K,) instead.

        Args:
            index: Columns or rows, ascending, as many as before.
            trained: The parameter's values; None begins at the base.
        """
        self._put(self.slice_base)
        self.slice_index.copy_(index)
        self.slice_base.copy_(self._take())
        self._begin() if trained is None else self.trained.copy_(trained)
        self.write()

    def _take(self) -> Tensor:
        axis = stored_axis(self)
        return whole(self.weight).index_select(axis, self.slice_index).movedim(axis, -1)

    def _put(self, values: Tensor) -> None:
        """Writes values, shaped as the parameter; of a sharded weight each process writes its own rows as stored."""
        stored, share, axis = own_share(self.weight), own_rows(self.weight), stored_axis(self)
        values, index = values.to(stored.dtype), self.slice_index
        if len(share) != self.weight.shape[0]:
            if axis == 0:
                own = (index >= share.start) & (index < share.stop)
                values, index = values[:, own], index[own] - share.start
            else:
                values = values[share.start : share.stop]
        stored.index_copy_(axis, index, values.movedim(-1, axis))

    @torch.no_grad()
    def _begin(self) -> None:
        """Sets the parameter to what the weight holds."""
        here = self._take().float()
        self.trained.copy_(here - self.slice_base.float() if self.to_base else here)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # The weight holds the slice already: a saved model has the base's keys and loads without this package.
        destination.pop(prefix + _PARAMETER[self.slice_axis])

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        key = prefix + _PARAMETER[self.slice_axis]
        if key in missing_keys:
            missing_keys.remove(key)
            self._begin()


class _ColumnsOfLinear(WeightSlice, nn.Linear):
    slice_axis, plain = COLUMNS, nn.Linear


class _RowsOfLinear(WeightSlice, nn.Linear):
    slice_axis, plain = ROWS, nn.Linear


class _ColumnsOfConv1D(WeightSlice, Conv1D):
    slice_axis, plain = COLUMNS, Conv1D


class _RowsOfConv1D(WeightSlice, Conv1D):
    slice_axis, plain = ROWS, Conv1D


_SLICED: dict[tuple[Any, int], type[WeightSlice]] = {
    (sliced.plain, sliced.slice_axis): sliced
    for sliced in (_ColumnsOfLinear, _RowsOfLinear, _ColumnsOfConv1D, _RowsOfConv1D)
}


def can_slice(layer: nn.Module | type[nn.Module]) -> bool:
    """Returns whether ``layer`` is a plain ``nn.Linear`` or ``Conv1D``, or such a class: not quantised, not adapted."""
    return (layer if isinstance(layer, type) else type(layer), COLUMNS) in _SLICED


def stored_axis(layer: Any) -> int:
    """Returns the axis of a sliced layer's weight as it is stored: ``Conv1D`` stores in x out."""
    axis: int = layer.slice_axis
    return 1 - axis if isinstance(layer, Conv1D) else axis


def oriented_weight(layer: nn.Module) -> Tensor:
    """Returns the weight of a linear layer as (out_features, in_features); a view."""
    weight = cast(Tensor, layer.weight)
    return weight.t() if isinstance(layer, Conv1D) else weight


def slice_weight(layer: nn.Module, index: Tensor, *, axis: int = COLUMNS, to_base: bool = False) -> WeightSlice:
    """Makes columns or rows of a frozen layer trainable and returns the same object.

    The class of the object changes, as ``torch.nn.utils.parametrize`` does it, so every reference to it stays right.

    Args:
        layer: A layer that :func:`can_slice` accepts.
        index: Distinct columns or rows, int64 (K,).
        axis: :data:`COLUMNS` or :data:`ROWS`.
        to_base: Whether the parameter is to hold changes, so that weight decay pulls to the base.
    """
    layer.__class__ = _SLICED[type(layer), axis]
    sliced = cast(WeightSlice, layer)
    sliced.to_base = to_base
    sliced.register_buffer("slice_index", index.sort().values.to(oriented_weight(sliced).device), persistent=False)
    base = sliced._take().contiguous()
    sliced.register_buffer("slice_base", base, persistent=False)
    start = torch.zeros_like(base, dtype=torch.float32) if to_base else base.to(torch.float32, copy=True)
    sliced.register_parameter(_PARAMETER[axis], nn.Parameter(start))
    return sliced


def unslice_weight(layer: WeightSlice) -> nn.Module:
    """Makes ``layer`` the plain layer again; its weight keeps the trained slice."""
    delattr(layer, _PARAMETER[layer.slice_axis])
    del layer.slice_index, layer.slice_base, layer.to_base
    layer.__class__ = layer.plain  # type: ignore[assignment]
    return layer


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
