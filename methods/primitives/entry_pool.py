"""All chosen entries of a model as one flat float32 parameter, laid over the frozen weights.

Each weight keeps its values; the pool holds the float32 master of the chosen ones, and gathers their gradients during
the backward pass of the model. A node of the autograd graph that every routed weight leads to hands the gathered
gradient to the pool's parameter, so that accumulation, clipping, scaling and data parallelism see an ordinary small
parameter. What chooses entries while training is an :class:`Observer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from finetune.core.errors import TrainingError
from finetune.methods.primitives.entry_gradient import BACKENDS, EntryPattern, fastest_backend
from finetune.methods.primitives.entry_modules import entries_alias, route_entries
from finetune.methods.primitives.hidden_parameter import hide_parameter
from finetune.methods.primitives.process_group import mean_over_processes
from finetune.methods.primitives.routed_parameter import Holder, holders_of, unroute
from finetune.methods.primitives.sharding import own_rows

__all__ = ["PARAMETER", "EntryPool", "EntryTensor", "Observer"]

PARAMETER = "selected_entries"
"""Name of the pool's parameter in the model."""


class Observer(Protocol):
    """Looks at dense gradients during the backward pass, and may choose more entries at its end."""

    def begin_pass(self) -> bool:
        """Returns whether this pass has to show the dense gradients."""

    def observe_factors(self, entries: EntryTensor, grad: Tensor, x: Tensor) -> bool:
        """Sees the factors (T, M) and (T, N) of a linear layer's gradient; returns whether they are enough."""

    def observe(self, entries: EntryTensor, gradient: Tensor) -> None:
        """Sees the flat dense gradient of one tensor, in the dtype of the pass; it is dropped afterwards."""

    def end_pass(self, gradient: Tensor) -> None:
        """Sees the pool's gradient, float32 (B,), before it is delivered; may choose entries and set theirs."""


@dataclass(eq=False)
class EntryTensor:
    """The chosen entries of one parameter of the base.

    Attributes:
        name: Its name in the model; a shared tensor has its first.
        pool: The pool that they are part of.
        holders: The modules that hold the parameter, and under which name.
        index: Flat row-major positions, ascending, int32 (int64 in very large tensors) (K,).
        slot: Position of each in the pool, of the index's dtype (K,).
        base: The base's values, in the weight's dtype (K,).
    """

    name: str
    pool: EntryPool
    holders: list[Holder]
    index: Tensor = field(init=False)
    slot: Tensor = field(init=False)
    base: Tensor = field(init=False)
    backend: str = field(default="dense", init=False)
    _pattern: EntryPattern | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        wide = self.weight.numel() >= 2**31 or self.pool.values.numel() >= 2**31
        empty = torch.empty(0, dtype=torch.int64 if wide else torch.int32, device=self.weight.device)
        self.index, self.slot, self.base = empty, empty.clone(), self.flat[:0].clone()

    @property
    def weight(self) -> nn.Parameter:
        """The parameter as its module holds it now: FSDP2 exchanges shard and whole."""
        module, name = self.holders[0]
        return cast(nn.Parameter, module._parameters[name])

    @property
    def flat(self) -> Tensor:
        """The weight as a vector: a view, or gathered where each process has a shard."""
        weight = self.weight.detach()
        whole: Tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return whole.view(-1)

    @property
    def pattern(self) -> EntryPattern:
        """The chosen entries of a matrix, as the backends take them."""
        if self._pattern is None:
            self._pattern = EntryPattern(self.index, *self.weight.shape)
        return self._pattern

    @torch.no_grad()
    def put(self, index: Tensor, values: Tensor) -> None:
        """Writes ``values``, rounded, at flat positions; of a sharded weight each process writes its own rows."""
        weight: Tensor = self.weight
        if isinstance(weight, DTensor):
            first = own_rows(weight).start * (weight.numel() // max(1, weight.shape[0]))
            weight = weight.to_local()
            own = (index >= first) & (index < first + weight.numel())
            index, values = index[own] - first, values[own]
        weight.view(-1).index_put_((index,), values.to(weight.dtype))

    def set(self, index: Tensor, slot: Tensor, base: Tensor) -> None:
        """Replaces what is chosen; sorts by position."""
        order = index.argsort()
        self.index, self.slot, self.base = index[order].to(self.index), slot[order].to(self.slot), base[order]
        self._pattern = None

    def alias(self, parameter: nn.Parameter) -> Tensor:
        """Returns the weight as a node of the graph that lets the pool have its gradient."""
        return entries_alias(parameter, self)

    def receive(self, gradient: Tensor) -> None:
        """Takes the dense gradient of one use of the parameter, of its shape."""
        flat, pool = gradient.reshape(-1), self.pool
        pool.add(self.slot, flat.index_select(0, self.index))
        if pool.showing():
            pool.show(self, flat)

    def receive_factors(self, grad: Tensor, x: Tensor) -> None:
        """Takes the two factors (T, M) and (T, N) of the gradient ``grad^T x`` of a linear layer's weight."""
        observer = self.pool.observer if self.pool.showing() else None
        # Where the dense product is the fastest way to the chosen entries, it is there to be shown.
        if observer is not None and (self.backend == "dense" or not observer.observe_factors(self, grad, x)):
            self.receive(grad.t() @ x)
        elif self.index.numel():
            self.pool.add(self.slot, BACKENDS[self.backend](grad, x, self.pattern))

    def to(self, device: torch.device) -> None:
        """Follows the weight to a device."""
        if self.index.device != device:
            self.index, self.slot, self.base = self.index.to(device), self.slot.to(device), self.base.to(device)
            self._pattern = None


class _Deliver(torch.autograd.Function):
    """Makes the token that all routed weights depend on; its backward comes after all of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, pool: EntryPool) -> Tensor:
        ctx.pool = pool
        return values.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.pool.finish_pass(), None


_deliver: Callable[..., Tensor] = _Deliver.apply


class EntryPool:
    """A flat parameter of ``capacity`` values over the tensors ``names`` of ``model``; none is chosen yet.

    Args:
        model: Registers the parameter; its ``state_dict`` does not show it, since the weights hold the values.
        tensors: Name -> parameter, in the order of ``model.named_parameters()``.
        capacity: B, the most entries that can be chosen.
        to_base: Whether the parameter holds changes of the base's values instead of values, so that weight decay pulls
            the weights towards the base and not towards zero.
        backend: How the gradient of a linear layer's entries is computed, or ``auto`` for the fastest here.
        observer: What chooses while training.

    Attributes:
        values: The parameter, float32 (B,).
        tensors: The tensors, by name.
        to_base: Whether the parameter holds changes.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: Mapping[str, nn.Parameter],
        capacity: int,
        *,
        to_base: bool = False,
        backend: str = "auto",
        observer: Observer | None = None,
    ) -> None:
        device = next(iter(tensors.values())).device
        self.values = nn.Parameter(torch.zeros(capacity, dtype=torch.float32, device=device))
        self.observer = observer
        self._showing: bool | None = None
        self.to_base = to_base
        self._gradient: Tensor | None = None
        self._token: Tensor | None = None
        self._shared: dict[EntryTensor, Tensor] = {}
        holders = holders_of(model)
        self.tensors = {name: EntryTensor(name, self, holders[id(weight)]) for name, weight in tensors.items()}
        for entries in self.tensors.values():
            entries.backend = _backend(entries, capacity / sum(p.numel() for p in tensors.values()), backend)
            for module, name in entries.holders:
                route_entries(module, name, entries)
        model.register_parameter(PARAMETER, self.values)
        self._model = model
        self._hooks = hide_parameter(model, PARAMETER, PARAMETER, self.read)

    @property
    def chosen(self) -> int:
        """Number of entries that are chosen."""
        return sum(entries.index.numel() for entries in self.tensors.values())

    def choose(self, choice: Mapping[str, Tensor]) -> None:
        """Chooses entries, by tensor name (flat positions, int64), in slots from the first on; earlier ones go."""
        self.restore_base()
        start = 0
        for name, entries in self.tensors.items():
            index = choice.get(name, torch.empty(0, dtype=torch.int64)).to(entries.weight.device).sort().values
            slot = torch.arange(start, start + index.numel(), device=index.device)
            entries.set(index, slot, entries.flat.index_select(0, index))
            start += index.numel()
        self.read()

    def extend(self, entries: EntryTensor, index: Tensor, slot: Tensor) -> None:
        """Chooses more entries of one tensor, at ``slot``, both int64 (K,), and reads their values."""
        base = entries.flat.index_select(0, index)
        with torch.no_grad():
            self.values[slot] = torch.zeros_like(base, dtype=torch.float32) if self.to_base else base.float()
        joined = (torch.cat(pair) for pair in ((entries.index, index), (entries.slot, slot), (entries.base, base)))
        entries.set(*joined)

    @torch.no_grad()
    def replace(self, entries: EntryTensor, dropped: Tensor, index: Tensor) -> Tensor:
        """Gives some chosen entries of a tensor their base values back and chooses others in their slots.

        Args:
            entries: The tensor.
            dropped: Places in ``entries.index``, int64 (R,).
            index: Flat positions that are not chosen, int64 (R,).

        Returns:
            The slots, of which each goes to the entry of ``index`` in the same place.
        """
        slot = entries.slot[dropped]
        entries.put(entries.index[dropped], entries.base[dropped])
        kept = torch.ones(entries.index.numel(), dtype=torch.bool, device=index.device)
        kept[dropped] = False
        entries.set(entries.index[kept], entries.slot[kept], entries.base[kept])
        self.extend(entries, index, slot)
        return slot

    @torch.no_grad()
    def read(self) -> None:
        """Takes the chosen values from the weights."""
        for entries in self.tensors.values():
            here = entries.flat.index_select(0, entries.index).float()
            self.values[entries.slot] = here - entries.base.float() if self.to_base else here

    @torch.no_grad()
    def write(self) -> None:
        """Rounds the chosen values into the weights.

        An ordinary in-place operation on purpose: between a forward and its backward autograd then raises, where a
        write through ``.data`` would give wrong gradients silently.
        """
        for entries in self.tensors.values():
            if entries.index.numel():
                entries.put(entries.index, self.absolute(entries))

    def absolute(self, entries: EntryTensor) -> Tensor:
        """Returns the float32 values (K,) of the entries of one tensor, in the order of its index."""
        values = self.values.detach().index_select(0, entries.slot)
        return values + entries.base.float() if self.to_base else values

    @torch.no_grad()
    def restore_base(self) -> None:
        """Gives all chosen entries their base values back."""
        for entries in self.tensors.values():
            entries.put(entries.index, entries.base)

    def token(self) -> Tensor:
        """Returns what a routed weight's node in the graph has to depend on."""
        if self._token is None:
            if torch._C._current_graph_task_id() != -1:
                raise TrainingError(
                    "activations are computed again by a nested backward pass, which would deliver the entries' "
                    "gradients in parts",
                    fix="gradient_checkpointing_kwargs={'use_reentrant': False}",
                )
            for entries in self.tensors.values():
                entries.to(entries.weight.device)
            self._token = _deliver(self.values, self)
        return self._token

    def showing(self) -> bool:
        """Returns whether the backward pass under way shows dense gradients to the observer; its start decides."""
        if self._showing is None:
            self._showing = self.observer is not None and self.observer.begin_pass()
        return self._showing

    def add(self, slot: Tensor, gradient: Tensor) -> None:
        """Adds gradients (K,) at ``slot``."""
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.values)
        self._gradient.index_add_(0, slot, gradient.to(self._gradient.dtype))

    def show(self, entries: EntryTensor, gradient: Tensor) -> None:
        """Shows a flat dense gradient to the observer; that of a shared parameter when all its uses are summed."""
        assert self.observer is not None
        if len(entries.holders) == 1:
            self.observer.observe(entries, gradient)
        elif entries in self._shared:
            self._shared[entries] += gradient
        else:
            self._shared[entries] = gradient.clone()

    def finish_pass(self) -> Tensor:
        """Ends a backward pass and returns the gradient of :attr:`values`."""
        while self._shared:
            entries, shared = self._shared.popitem()
            assert self.observer is not None
            self.observer.observe(entries, shared)
        gradient = torch.zeros_like(self.values) if self._gradient is None else self._gradient
        if self.showing():
            assert self.observer is not None
            self.observer.end_pass(gradient)
        self._gradient = self._token = self._showing = None
        # DDP averages the parameter's gradient, FSDP2 leaves a parameter that it does not shard alone.
        return mean_over_processes(gradient) if isinstance(self._model, FSDPModule) else gradient

    def detach(self) -> None:
        """Makes the model plain again; its weights keep the values."""
        for hook in self._hooks:
            hook.remove()
        for entries in self.tensors.values():
            for module, _ in entries.holders:
                unroute(module)
        delattr(self._model, PARAMETER)

    def __getstate__(self) -> dict[str, Any]:
        # Nothing of a pass under way can be copied, and a copy of the model has no business with the choosing.
        return {**self.__dict__, "_token": None, "_gradient": None, "_shared": {}, "observer": None, "_showing": None}


def _backend(entries: EntryTensor, density: float, wanted: str) -> str:
    """Returns the backend for one tensor: only a matrix that one ``nn.Linear`` holds has a choice."""
    (module, name), *others = entries.holders
    if others or type(module) is not nn.Linear or name != "weight" or entries.weight.is_meta:
        return "dense"
    if wanted != "auto":
        return wanted
    rows, columns = entries.weight.shape
    nominal = 1 << max(0, round(density * rows * columns) - 1).bit_length()
    return fastest_backend(rows, columns, nominal, entries.weight.dtype, entries.weight.device)
