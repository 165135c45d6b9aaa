"""A linear layer with a trained change of some of its input columns or output rows, beside an untouched weight.

For bases whose weights cannot be written, quantised ones above all: ``y = base(x) + x[..., S] D^T`` for columns, and
``y[..., S] += x D`` for rows. The layer may be of any class that multiplies by (out_features, in_features).
"""

# Legend: T tokens (all leading dimensions), N in_features, M out_features, K trained columns or rows

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.methods.primitives.projections import in_features, out_features
from finetune.methods.primitives.weight_slice import COLUMNS, oriented_weight

__all__ = ["SliceDelta", "add_slice_delta", "merge_slice_delta", "remove_slice_delta"]


class SliceDelta(nn.Module):
    """What :func:`add_slice_delta` adds to a layer's class.

    Attributes:
        slice_delta: The trained change, float32: (M, K) of columns, (N, K) of rows.
        slice_index: The columns or rows, int64 (K,), ascending.
        slice_axis: ``ROWS`` or ``COLUMNS``.
        plain: The class that the layer had.
    """

    slice_delta: nn.Parameter
    slice_index: Tensor
    slice_axis: int
    plain: type[nn.Module]

    @property
    def trained(self) -> nn.Parameter:
        """The trained parameter."""
        return self.slice_delta

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns what the base layer does, plus the change, in the base layer's dtype."""
        y: Tensor = super().forward(x, *args, **kwargs)
        delta = self.slice_delta.to(x.dtype)
        if self.slice_axis == COLUMNS:
            return y + F.linear(x.index_select(-1, self.slice_index), delta).to(y.dtype)
        return y.index_add(-1, self.slice_index, (x @ delta).to(y.dtype))

    @torch.no_grad()
    def select(self, index: Tensor, trained: Tensor) -> None:
        """Trains the slice of ``index`` (K,) instead, from the change ``trained``."""
        self.slice_index.copy_(index)
        self.slice_delta.copy_(trained)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # A stock state_dict is that of the base.
        destination.pop(prefix + "slice_delta")

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        if prefix + "slice_delta" in missing_keys:
            missing_keys.remove(prefix + "slice_delta")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (self.plain,), self.__dict__


def add_slice_delta(layer: nn.Module, index: Tensor, *, axis: int) -> SliceDelta:
    """Adds a trained change, zero at first, to columns or rows of a frozen layer; returns the same object.

    Args:
        layer: A linear layer of any class.
        index: Distinct columns or rows, int64 (K,).
        axis: ``COLUMNS`` or ``ROWS``.
    """
    other = out_features(layer) if axis == COLUMNS else in_features(layer)
    device = next(layer.parameters()).device
    plain: Any = type(layer)
    layer.__class__ = _delta_class(plain)
    changed = cast(SliceDelta, layer)
    changed.slice_axis = axis
    changed.register_buffer("slice_index", index.sort().values.to(device), persistent=False)
    changed.slice_delta = nn.Parameter(torch.zeros(other, index.numel(), dtype=torch.float32, device=device))
    return changed


def remove_slice_delta(layer: SliceDelta) -> nn.Module:
    """Makes ``layer`` the plain layer again, without the change."""
    del layer.slice_delta, layer.slice_index, layer.slice_axis
    layer.__class__ = layer.plain  # type: ignore[assignment]
    return layer


@torch.no_grad()
def merge_slice_delta(layer: SliceDelta) -> nn.Module:
    """Adds the change to the weight, which must be a plain one, in float32, and makes ``layer`` plain again."""
    delta, index, axis = layer.slice_delta.detach(), layer.slice_index, layer.slice_axis
    weight = oriented_weight(remove_slice_delta(layer))
    here = weight.index_select(axis, index).float()
    weight.index_copy_(axis, index, (here + delta.movedim(-1, axis)).to(weight.dtype))
    return layer


@functools.cache
def _delta_class(plain: Any) -> type[nn.Module]:
    return type(f"Delta{plain.__name__}", (SliceDelta, plain), {"plain": plain, "__module__": __name__})


def _empty(plain: Any) -> nn.Module:
    changed = _delta_class(plain)
    return changed.__new__(changed)
