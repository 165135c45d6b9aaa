"""Directions over whole tensors: what perturbs them for a forward pass, and what moves them along a direction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from finetune.core.errors import CapabilityError
from finetune.methods.primitives.add_noise import add_noise
from finetune.methods.primitives.blocks import find_blocks
from finetune.methods.primitives.hash_noise import Noise, derive_key
from finetune.methods.primitives.sharding import first_row, in_shards, is_sharded, own_share, take_apart

__all__ = ["DenseDirections", "Engine", "direction_numbers"]

Engine = Literal["copy", "onthefly", "inplace"]
_ALIGNED = 64
_WRAPPERS = ("base_model.model.", "module.", "_orig_mod.")


def direction_numbers(names: Iterator[str] | list[str]) -> dict[str, int]:
    """Returns each parameter's number in the noise: its place in the sorted names, whatever wraps the model."""
    plain = {}
    for name in names:
        key = name
        for wrapper in _WRAPPERS:
            key = key.replace(wrapper, "")
        plain[name] = key
    return {name: number for number, name in enumerate(sorted(plain, key=lambda name: plain[name]))}


class DenseDirections:
    """One random number per entry of some parameters, regenerated wherever it is needed and held nowhere.

    Args:
        model: The model that they belong to. FSDP2 may take it apart later: each process then makes the numbers of its
            shards, and perturbs them in place beside a copy of them, whatever the engine; ``inplace`` without.
        names: Of the parameters.
        seed: Of the whole run.
        noise: Distribution of the numbers.
        engine: ``copy`` perturbs into a second copy of the tensors; ``onthefly`` into a buffer of the size of the
            largest transformer block, block by block; ``inplace`` adds and takes off, which leaves rounding behind.
        limits: Largest magnitude of an entry that takes part, by name.
        stochastic: Whether updates of bfloat16 tensors round by chance.
        decays: Whether weight decay acts on the matrices among the tensors.
        alike: Whether all processes measure along the same direction at a time.
        changed: Called when the tensors have new values, where the forward pass reads another copy of them.
    """

    def __init__(
        self,
        model: Any,
        names: Iterable[str],
        *,
        seed: int,
        noise: Noise,
        engine: Engine,
        limits: Mapping[str, float] | None = None,
        stochastic: bool = False,
        decays: bool = True,
        changed: Callable[[], None] | None = None,
        alike: bool = True,
    ) -> None:
        self._model, self._names = model, tuple(names)
        self._numbers = direction_numbers(list(self._names))
        self._seed, self._noise, self._engine = seed, noise, engine
        self._limits = dict(limits or {})
        self._stochastic, self._decays, self._changed = stochastic, decays, changed
        self.step = 0
        self._now: tuple[int, Tensor] | None = None
        self._in_shards, self._alike = False, alike
        self._own: dict[str, Tensor] = {}
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._blocks, self._resident = self._by_block(model)
        self._handles: list[Any] = []
        for block, names in self._blocks:
            enter, leave = _BlockHook(self, names, enter=True), _BlockHook(self, names, enter=False)
            self._handles.append(block.register_forward_pre_hook(enter))
            self._handles.append(block.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._buffers.clear()

    @contextlib.contextmanager
    def perturbed(self, query: int, scale: float) -> Iterator[None]:
        """Makes every forward pass see ``W + scale z``; the weights themselves stay, but for ``inplace``."""
        self._in_shards = is_sharded(self._model)
        if self._in_shards and not self._alike:
            raise CapabilityError(
                "every process has a part of the same weights, so all have to move them along one direction at a time",
                where="method.directions, method.perturbation_parallel",
                want="shared, and 1",
                fix="method.name: lozo, whose directions lie beside the weights, or engine.strategy: ddp",
            )
        names = list(self._names) if self._in_shards else self._resident
        with in_shards(self._model):
            device = own_share(self._parameter(self._names[0])).device
            self._now = (query, torch.tensor([scale], dtype=torch.float64, device=device))
            self._swap_in(names, "resident")
            self._tell()
        try:
            yield
        finally:
            with in_shards(self._model):
                self._swap_out(names)
                self._now = None
                self._tell()

    def move(self, distances: Tensor, *, decay: float = 1.0) -> None:
        """Adds ``sum_i distances[i] z_i`` to the weights, after decaying the matrices among them."""
        take_apart(self._model)
        for name in self._names:
            parameter = self._parameter(name)
            share = own_share(parameter)
            add_noise(
                share,
                share,
                [self._key(query, name) for query in range(len(distances))],
                distances,
                noise=self._noise,
                limit=self._limits.get(name),
                decay=decay if self._decays and parameter.ndim > 1 else 1.0,
                stochastic=self._stochastic and parameter.dtype == torch.bfloat16,
                first=first_row(parameter),
            )
        self.step += 1
        self._tell()

    def _parameter(self, name: str) -> nn.Parameter:
        """Returns a parameter as the modules hold it now: FSDP2 puts shards in its place."""
        return self._model.get_parameter(name)  # type: ignore[no-any-return]

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed()

    def _key(self, query: int, name: str) -> int:
        return derive_key(self._seed, self.step, query, self._numbers[name])

    def _by_block(self, model: Any) -> tuple[list[tuple[nn.Module, list[str]]], list[str]]:
        """Returns the blocks with the tensors that only they hold, and the tensors that a whole pass sees perturbed."""
        if self._engine != "onthefly":
            return [], list(self._names)
        _, blocks = find_blocks(model)
        held = {id(parameter): block for block in blocks for parameter in block.parameters()}
        grouped: dict[int, tuple[nn.Module, list[str]]] = {}
        resident = []
        for name in self._names:
            if (block := held.get(id(self._parameter(name)))) is None:
                resident.append(name)
            else:
                grouped.setdefault(id(block), (block, []))[1].append(name)
        return list(grouped.values()), resident

    def _swap_in(self, names: list[str], place: str) -> None:
        if self._now is None:
            return
        query, scale = self._now
        if self._engine == "inplace":
            for name in names:
                share = own_share(self._parameter(name))
                self._add(name, share, share, query, scale)
            return
        buffers = self._buffer(names, place)
        for name in names:
            parameter, buffer = self._parameter(name), buffers[name]
            if self._in_shards:
                share = own_share(parameter)
                self._own[name] = buffer.copy_(share)
                self._add(name, share, buffer, query, scale)
            else:
                self._add(name, buffer, parameter.data, query, scale)
                self._own[name], parameter.data = parameter.data, buffer

    def _swap_out(self, names: list[str]) -> None:
        if self._engine == "inplace" and self._now is not None:
            query, scale = self._now
            for name in names:
                share = own_share(self._parameter(name))
                self._add(name, share, share, query, -scale)
            return
        for name in names:
            if name not in self._own:
                continue
            parameter, own = self._parameter(name), self._own.pop(name)
            if self._in_shards:
                own_share(parameter).copy_(own)
            else:
                parameter.data = own

    def _add(self, name: str, out: Tensor, weight: Tensor, query: int, scale: Tensor) -> None:
        first = first_row(self._parameter(name))
        key, limit = self._key(query, name), self._limits.get(name)
        add_noise(out, weight, [key], scale, noise=self._noise, limit=limit, first=first)

    def _buffer(self, names: list[str], place: str) -> dict[str, Tensor]:
        """Returns where the perturbed tensors go: views of one flat buffer per dtype, which grows to the largest."""
        ends: dict[torch.dtype, int] = {}
        starts = {}
        for name in names:
            tensor = own_share(self._parameter(name))
            start = ends.get(tensor.dtype, 0)
            starts[name] = start
            ends[tensor.dtype] = start + -(-tensor.numel() // _ALIGNED) * _ALIGNED
        views = {}
        for name in names:
            tensor = own_share(self._parameter(name))
            key = (place, tensor.dtype)
            flat = self._buffers.get(key)
            if flat is None or flat.numel() < ends[tensor.dtype] or flat.device != tensor.device:
                flat = self._buffers[key] = torch.empty(ends[tensor.dtype], dtype=tensor.dtype, device=tensor.device)
            views[name] = flat[starts[name] : starts[name] + tensor.numel()].view(tensor.shape)
        return views


class _BlockHook:
    """Perturbs the tensors of one block before its forward pass, or gives it its own back; a class so as to pickle."""

    def __init__(self, directions: DenseDirections, names: list[str], *, enter: bool) -> None:
        self._directions, self._names, self._enter = directions, names, enter

    def __call__(self, module: nn.Module, *given: Any) -> None:
        if self._directions._in_shards:
            return
        if self._enter:
            self._directions._swap_in(self._names, "block")
        else:
            self._directions._swap_out(self._names)
