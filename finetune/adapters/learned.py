"""One learned state as positions of base tensors, what they held, and what they hold now."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.core.errors import CapabilityError, CheckpointError
from finetune.core.learned_state import BASE, DELTA, DELTA_CONFIG, INDEX, VALUE, learned_names, read_learned_state

__all__ = ["Learned", "LearnedTensor", "read_learned", "require_same_base"]


@dataclass(frozen=True)
class LearnedTensor:
    """What was learned of one base tensor.

    Attributes:
        name: Its name in the base.
        shape: Its shape.
        axis: The axis that ``index`` counts along; None for entries of the flattened tensor.
        index: Positions, int64 ascending (K,).
        value: Trained values, float32, K last.
        base: What the base holds there, in its dtype, K last.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None
    index: Tensor
    value: Tensor
    base: Tensor

    @property
    def change(self) -> Tensor:
        """Value minus base, float32."""
        return self.value - self.base.float()

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns flat positions, ascending, values and base values, each (entries,)."""
        if self.axis is None:
            return self.index, self.value, self.base
        places = torch.arange(math.prod(self.shape)).reshape(self.shape).index_select(self.axis, self.index)
        flat = places.movedim(self.axis, -1).reshape(-1)
        order = flat.argsort()
        return flat[order], self.value.reshape(-1)[order], self.base.reshape(-1)[order]

    def holds(self, weight: Tensor, values: Tensor) -> bool:
        """Returns whether ``weight`` has ``values``, rounded to its dtype, at these positions."""
        if tuple(weight.shape) != self.shape:
            return False
        vector, axis = (weight.view(-1), 0) if self.axis is None else (weight, self.axis)
        here = vector.index_select(axis, self.index.to(weight.device)).movedim(axis, -1)
        return torch.equal(here, values.to(here))

    @torch.no_grad()
    def write(self, weight: Tensor, values: Tensor) -> None:
        """Writes ``values`` at these positions, rounded once."""
        vector, axis = (weight.view(-1), 0) if self.axis is None else (weight, self.axis)
        vector.index_copy_(axis, self.index.to(weight.device), values.to(weight).movedim(-1, axis))


@dataclass(frozen=True)
class Learned:
    """A learned state.

    Attributes:
        folder: Where it lies.
        tensors: By name, sorted.
        metadata: What its config says.
    """

    folder: Path
    tensors: dict[str, LearnedTensor]
    metadata: dict[str, Any]

    def require(self, model: nn.Module, *, tuned: bool) -> dict[str, nn.Parameter]:
        """Returns the parameters of ``model`` that the state is about, if they hold its base or tuned values.

        Raises:
            CheckpointError: They do not, or the model lacks one.
        """
        parameters = dict(model.named_parameters())
        for name, tensor in self.tensors.items():
            wanted = tensor.value if tuned else tensor.base
            if name not in parameters or not tensor.holds(parameters[name].detach(), wanted):
                raise CheckpointError(
                    f"the model does not hold the {'tuned' if tuned else 'base'} values of the adapter",
                    where=f"{self.folder}: {name}",
                    want=f"{self.metadata.get('base_model') or 'its base model'} {'with' if tuned else 'without'} it",
                    fix="apply it first" if tuned else "the base that it was trained on, or unapply what is on it",
                )
        return {name: parameters[name] for name in self.tensors}


def require_same_base(first: Learned, other: Learned) -> None:
    """Checks that two states were learned on the same base.

    Raises:
        CheckpointError: They were not.
    """
    if first.metadata.get("base_fingerprint") != other.metadata.get("base_fingerprint"):
        raise CheckpointError(
            "the adapters belong to different base models",
            where=str(other.folder),
            got=str(other.metadata.get("base_model")),
            want=str(first.metadata.get("base_model")),
        )


def read_learned(folder: str | Path) -> Learned:
    """Reads a learned state of changed positions.

    Raises:
        CapabilityError: It holds whole tensors, or changes beside weights, of which it does not know the base values.
        CheckpointError: It is missing or damaged.
    """
    folder = Path(folder)
    if (folder / "adapter_config.json").is_file() and not (folder / DELTA_CONFIG).is_file():
        raise CapabilityError(
            "this is an adapter of PEFT, which adds modules and does not change the base's own weights",
            where=str(folder),
            fix="finetune merge RUN OUT, or stock PEFT's load_adapter, set_adapter, add_weighted_adapter",
        )
    tensors, metadata = read_learned_state(folder)
    found = {name: _tensor(folder, name, tensors, metadata) for name in learned_names(tensors)}
    return Learned(folder, found, metadata)


def _tensor(folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> LearnedTensor:
    if f"{name}{INDEX}" not in tensors or f"{name}{DELTA}" in tensors:
        raise CapabilityError(
            f"{metadata.get('method')} did not keep what the base holds, so what it learned cannot be taken off again",
            where=f"{folder}: {name}",
            want="learned states of s2ft (in place) or of a mask of entries",
            fix="finetune merge RUN OUT",
        )
    try:
        axis, shape = metadata["axes"][name], tuple(metadata["shapes"][name])
        index, value, base = (tensors[f"{name}{part}"] for part in (INDEX, VALUE, BASE))
    except KeyError as error:
        raise CheckpointError("the learned state is incomplete", where=f"{folder}: {name}", got=str(error)) from error
    size = math.prod(shape) if axis is None else shape[axis]
    outside = index.numel() and not (int(index.min()) >= 0 and int(index.max()) < size)
    if outside or not (value.shape == base.shape and value.shape[-1:] == index.shape):
        raise CheckpointError(
            "the learned state is damaged: positions and values do not fit the tensor", where=f"{folder}: {name}"
        )
    return LearnedTensor(name, shape, axis, index.long(), value.float(), base)
