"""Rows of a weight, or all of it, as one float32 parameter laid over the frozen weight.

The weight keeps its values and its dtype, and is what the forward pass multiplies with; its gradient goes to the
parameter. After every optimizer step :meth:`TrainedRows.write` rounds the parameter into the weight. Works for a
parameter of any module, shared ones too; one dense gradient is alive during its own backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from finetune.core.errors import CheckpointError
from finetune.core.learned_state import BASE, DELTA, INDEX, TRAINING, VALUE, narrowest_exact, require_same_shapes
from finetune.methods.primitives.hidden_parameter import hide_parameter
from finetune.methods.primitives.routed_parameter import Holder, route_parameter, unroute
from finetune.methods.primitives.sharding import own_rows, own_share, whole

__all__ = ["TrainedRows", "load_rows", "rows_state"]

_SCALE = ".scale"


class _Alias(torch.autograd.Function):
    """The weight itself; the backward gives its gradient to the parameter."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor, rows: TrainedRows) -> Tensor:
        ctx.rows, ctx.dtype = rows, values.dtype
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.rows.gradient_of(grad).to(ctx.dtype), None


# torch does not annotate it.
_alias: Callable[..., Tensor] = _Alias.apply


class TrainedRows:
    """Rows of one parameter of the base that train.

    Args:
        name: The parameter's name in the model.
        holders: The modules that hold it; the first gets the trained parameter, called ``NAME_rows``.
        axis: The axis of the stored weight that rows are counted along: 1 for the output features of a ``Conv1D``.
        index: Which, int64 ascending (K,); None for all.
        to_base: Whether the parameter holds the change of the base's values, so that weight decay pulls towards the
            base. Else it holds values.
        scale: Factor of each row's change, float32 (K,) in [0, 1]; needs ``to_base``.
        scales_gradient: Whether ``scale`` multiplies the gradient of each row instead.
    """

    def __init__(
        self,
        name: str,
        holders: Sequence[Holder],
        *,
        axis: int = 0,
        index: Tensor | None = None,
        to_base: bool = False,
        scale: Tensor | None = None,
        scales_gradient: bool = False,
    ) -> None:
        self.name, self.holders = name, list(holders)
        self.axis, self.index, self.to_base = axis, index, to_base
        self.scales_gradient = scales_gradient
        weight = self.weight.detach()
        # Every process of a sharded run has the base's values in one piece.
        self.index = None if index is None else index.to(weight.device)
        self.scale = None if scale is None else scale.to(weight.device)
        self.base = self._select(weight).clone()
        start = torch.zeros_like(self.base, dtype=torch.float32) if to_base else self.base.to(torch.float32, copy=True)
        module, leaf = self.holders[0]
        module.register_parameter(f"{leaf}_rows", nn.Parameter(start))
        for holder, own in self.holders:
            route_parameter(holder, own, self)
        self._hooks = hide_parameter(module, f"{leaf}_rows", f"{name}_rows", self.read)

    @property
    def weight(self) -> nn.Parameter:
        """The base's parameter as its module holds it now: FSDP2 exchanges shard and whole."""
        module, leaf = self.holders[0]
        return cast(nn.Parameter, module._parameters[leaf])

    @property
    def values(self) -> nn.Parameter:
        """The trained parameter, float32, of the weight's shape but for K rows."""
        module, leaf = self.holders[0]
        return cast(nn.Parameter, module._parameters[f"{leaf}_rows"])

    def alias(self, parameter: nn.Parameter) -> Tensor:
        """Returns the weight as a node of the graph that gives its gradient to :attr:`values`."""
        self._follow(parameter.device)
        return _alias(parameter, self.values, self)

    def gradient_of(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of :attr:`values`, given that of the weight."""
        part = self._select(gradient)
        return part * self._factors(part) if self.scales_gradient else part

    def _select(self, tensor: Tensor) -> Tensor:
        return tensor if self.index is None else tensor.index_select(self.axis, self.index)

    def _factors(self, rows: Tensor, own: slice = slice(None)) -> Tensor:
        """Returns the scale so that it multiplies ``rows``, those of ``own`` along the first axis."""
        assert self.scale is not None
        scale = self.scale[own] if self.axis == 0 else self.scale
        shape = [1] * rows.ndim
        shape[self.axis] = -1
        return scale.to(rows.dtype).view(shape)

    def absolute(self) -> Tensor:
        """Returns what the rows are now, float32, in one piece."""
        return self._absolute(whole(self.values), slice(None))

    def _absolute(self, values: Tensor, own: slice) -> Tensor:
        self._follow(values.device)
        if not self.to_base:
            return values
        scaled = self.scale is not None and not self.scales_gradient
        return self.base[own].float() + (values * self._factors(values, own) if scaled else values)

    @torch.no_grad()
    def write(self) -> None:
        """Rounds the rows into the weight; of a sharded weight each process writes its own.

        An ordinary in-place operation on purpose: between a forward and its backward autograd then raises, where a
        write through ``.data`` would give wrong gradients silently.
        """
        weight, share = own_share(self.weight), own_rows(self.weight)
        self._follow(weight.device)
        if self.index is None or self.axis != 0 or len(share) == self.weight.shape[0]:
            # Weight and parameter are in one piece, or cut along the same axis into the same parts.
            values = self._absolute(own_share(self.values), slice(share.start, share.stop))
            index = self.index
        else:
            own = (self.index >= share.start) & (self.index < share.stop)
            values, index = self.absolute()[own], self.index[own] - share.start
        if index is None:
            weight.copy_(values)
        else:
            weight.index_copy_(self.axis, index, values.to(weight.dtype))

    @torch.no_grad()
    def read(self) -> None:
        """Takes the rows from the weight; what is there already stays as it is, bit for bit.

        Raises:
            CheckpointError: Rows that cannot move are not those of the base.
        """
        weight = whole(self.weight)
        self._follow(weight.device)
        here = self._select(weight)
        if torch.equal(here, self.absolute().to(here.dtype)):
            return
        values = here.float() - self.base.float() if self.to_base else here.float()
        if self.to_base and self.scale is not None and not self.scales_gradient:
            factors = self._factors(values)
            if bool(((factors == 0) & (values != 0)).any()):
                raise CheckpointError("rows that are not to move differ from the base", where=self.name)
            values = torch.where(factors == 0, 0.0, values / factors)
        self.set(values)

    @torch.no_grad()
    def set(self, values: Tensor) -> None:
        """Gives the parameter values, in one piece, and writes them."""
        share = own_rows(self.values)
        own_share(self.values).copy_(values[share.start : share.stop])
        self.write()

    def remove(self) -> None:
        """Makes the modules plain again; the weight keeps the rows."""
        for hook in self._hooks:
            hook.remove()
        for module, _ in self.holders:
            unroute(module)
        module, leaf = self.holders[0]
        delattr(module, f"{leaf}_rows")

    def _follow(self, device: torch.device) -> None:
        """Has what belongs to the rows where the weight is: a model may be moved after the method is attached."""
        if self.base.device == device:
            return
        self.base = self.base.to(device)
        self.index = None if self.index is None else self.index.to(device)
        self.scale = None if self.scale is None else self.scale.to(device)


def rows_state(rows: Mapping[str, TrainedRows]) -> dict[str, Tensor]:
    """Returns, by name of a parameter, ``NAME.value``, with ``index`` and ``base`` where it is not all of it.

    What only resuming needs, the change itself and the scale, is under ``training/``.
    """
    state: dict[str, Tensor] = {}
    for name, own in rows.items():
        value = own.absolute()
        state[f"{name}{VALUE}"] = value if own.index is None else value.movedim(own.axis, -1)
        if own.index is not None:
            state[f"{name}{INDEX}"] = own.index.to(torch.int32)
            state[f"{name}{BASE}"] = narrowest_exact(own.base).movedim(own.axis, -1)
        if own.to_base:
            # The sum with the base is rounded: training goes on from the change itself.
            state[f"{TRAINING}{name}{DELTA}"] = whole(own.values)
        if own.scale is not None:
            state[f"{TRAINING}{name}{_SCALE}"] = own.scale
    return state


def load_rows(rows: Mapping[str, TrainedRows], state: Mapping[str, Tensor]) -> None:
    """Restores what :func:`rows_state` returned; strict.

    Raises:
        CheckpointError: A tensor is missing, unexpected, of another shape, or belongs to other rows or another base.
    """
    require_same_shapes(rows_state(rows), dict(state))
    for name, own in rows.items():
        if own.index is None:
            continue
        base = state[f"{name}{BASE}"].movedim(-1, own.axis).to(own.base)
        if not torch.equal(own.index, state[f"{name}{INDEX}"].to(own.index)) or not torch.equal(own.base, base):
            raise CheckpointError(
                "the learned state belongs to other rows or another base model",
                where=name,
                fix="attach with the config and base that the state was trained with",
            )
    for name, own in rows.items():
        if own.scale is not None:
            own.scale = state[f"{TRAINING}{name}{_SCALE}"].to(own.scale)
        value = state[f"{name}{VALUE}"]
        value = value if own.index is None else value.movedim(-1, own.axis)
        own.set(state[f"{TRAINING}{name}{DELTA}"] if own.to_base else value)
