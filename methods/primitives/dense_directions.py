"""Directions over whole tensors: what perturbs them for a forward pass, and what moves them along a direction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from finetune.methods.primitives.add_noise import add_noise
from finetune.methods.primitives.blocks import find_blocks
from finetune.methods.primitives.hash_noise import Noise, derive_key

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
        model: The model that they belong to.
        tensors: The parameters, by name.
        seed: Of the whole run.
        noise: Distribution of the numbers.
        engine: ``copy`` perturbs into a second copy of the tensors; ``onthefly`` into a buffer of the size of the
            largest transformer block, block by block; ``inplace`` adds and takes off, which leaves rounding behind.
        limits: Largest magnitude of an entry that takes part, by name.
        stochastic: Whether updates of bfloat16 tensors round by chance.
        decays: Whether weight decay acts on the matrices among the tensors.
        changed: Called when the tensors have new values, where the forward pass reads another copy of them.
    """

    reads_only = False

    def __init__(
        self,
        model: Any,
        tensors: Mapping[str, nn.Parameter],
        *,
        seed: int,
        noise: Noise,
        engine: Engine,
        limits: Mapping[str, float] | None = None,
        stochastic: bool = False,
        decays: bool = True,
        changed: Callable[[], None] | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self._numbers = direction_numbers(list(tensors))
        self._seed, self._noise, self._engine = seed, noise, engine
        self._limits = dict(limits or {})
        self._stochastic, self._decays, self._changed = stochastic, decays, changed
        self.step = 0
        self._now: tuple[int, Tensor] | None = None
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
        device = next(iter(self.tensors.values())).device
        self._now = (query, torch.tensor([scale], dtype=torch.float64, device=device))
        try:
            self._swap_in(self._resident, "resident")
            self._tell()
            yield
        finally:
            self._swap_out(self._resident)
            self._now = None
            self._tell()

    def move(self, distances: Tensor, *, decay: float = 1.0) -> None:
        """Adds ``sum_i distances[i] z_i`` to the weights, after decaying the matrices among them."""
        for name, parameter in self.tensors.items():
            add_noise(
                parameter.data,
                parameter.data,
                [self._key(query, name) for query in range(len(distances))],
                distances,
                noise=self._noise,
                limit=self._limits.get(name),
                decay=decay if self._decays and parameter.ndim > 1 else 1.0,
                stochastic=self._stochastic and parameter.dtype == torch.bfloat16,
            )
        self.step += 1
        self._tell()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed()

    def _key(self, query: int, name: str) -> int:
        return derive_key(self._seed, self.step, query, self._numbers[name])

    def _by_block(self, model: Any) -> tuple[list[tuple[nn.Module, list[str]]], list[str]]:
        """Returns the blocks with the tensors that only they hold, and the tensors that a whole pass sees perturbed."""
        if self._engine != "onthefly":
            return [], list(self.tensors)
        _, blocks = find_blocks(model)
        held = {id(parameter): block for block in blocks for parameter in block.parameters()}
        grouped: dict[int, tuple[nn.Module, list[str]]] = {}
        resident = []
        for name, parameter in self.tensors.items():
            if (block := held.get(id(parameter))) is None:
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
                self._add(name, self.tensors[name].data, query, scale)
            return
        buffers = self._buffer(names, place)
        for name in names:
            parameter, buffer = self.tensors[name], buffers[name]
            self._add(name, buffer, query, scale)
            self._own[name], parameter.data = parameter.data, buffer

    def _swap_out(self, names: list[str]) -> None:
        if self._engine == "inplace" and self._now is not None:
            query, scale = self._now
            for name in names:
                self._add(name, self.tensors[name].data, query, -scale)
            return
        for name in names:
            if name in self._own:
                self.tensors[name].data = self._own.pop(name)

    def _add(self, name: str, out: Tensor, query: int, scale: Tensor) -> None:
        weight, key = self.tensors[name].data, self._key(query, name)
        add_noise(out, weight, [key], scale, noise=self._noise, limit=self._limits.get(name))

    def _buffer(self, names: list[str], place: str) -> dict[str, Tensor]:
        """Returns where the perturbed tensors go: views of one flat buffer per dtype, which grows to the largest."""
        ends: dict[torch.dtype, int] = {}
        starts = {}
        for name in names:
            tensor = self.tensors[name].data
            start = ends.get(tensor.dtype, 0)
            starts[name] = start
            ends[tensor.dtype] = start + -(-tensor.numel() // _ALIGNED) * _ALIGNED
        views = {}
        for name in names:
            tensor = self.tensors[name].data
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
        if self._enter:
            self._directions._swap_in(self._names, "block")
        else:
            self._directions._swap_out(self._names)
