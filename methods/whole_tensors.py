"""Base of the methods that train whole tensors of the base model's own weights and freeze the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from finetune.core.learned_state import (
    VALUE,
    require_same_shapes,
)
from finetune.methods.base import Kind, MethodConfig
from finetune.methods.in_place import InPlace

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["WholeTensors", "WholeTensorsConfig"]


class WholeTensorsConfig(MethodConfig):
    """What all methods that train whole tensors share."""

    trainable_dtype: Literal["float32", "base"] = Field(
        default="float32",
        description="Dtype of the trained tensors. float32 keeps small steps that 16-bit weights would round away, and "
        "the forward runs under autocast; base trains the weights as they are.",
    )


class WholeTensors(InPlace):
    """Trains the tensors that :meth:`choose` names, in place.

    With a 16-bit base the trained tensors become float32 until :meth:`merge`, and every forward pass runs under
    autocast in the base's dtype, whatever the loop. Memory per trained parameter: 4 bytes value, 4 gradient, 8 Adam.
    Saved: the trained tensors, a tensor that two modules share once.
    """

    kind: ClassVar[Kind] = "subset"
    shards: ClassVar[bool] = True
    Config: ClassVar[type[MethodConfig]] = WholeTensorsConfig
    config: WholeTensorsConfig

    @abstractmethod
    def choose(self, model: nn.Module, candidates: frozenset[str]) -> Sequence[str]:
        """Returns which parameters of the plain ``model`` train, by name, all of them in ``candidates``.

        Raises:
            TargetError: The model has not what the config asks for.
        """

    def narrow(self, model: nn.Module, candidates: frozenset[str]) -> frozenset[str]:
        """Returns what a later method may choose from, where this one only names candidates."""
        return frozenset(self.choose(model, candidates))

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        self._owner, self._names = model, tuple(self.choose(model, candidates))
        self._base_dtypes = {name: parameter.dtype for name, parameter in self._tensors.items()}
        for parameter in self._tensors.values():
            parameter.requires_grad_(True)
        self._set_up(model)
        return model

    @property
    def _tensors(self) -> dict[str, nn.Parameter]:
        """What trains, as the modules hold it now: FSDP2 puts shards in its place."""
        return {name: self._owner.get_parameter(name) for name in self._names}

    def _set_up(self, model: nn.Module) -> None:
        """Prepares the tensors, which require gradients now, and the forward pass of ``model``."""
        from finetune.methods.primitives.master_weights import AutocastForward, widen

        self._autocast = None
        if self.config.trainable_dtype == "float32" and (narrow := widen(self._tensors.values())) is not None:
            self._autocast = AutocastForward([model], narrow)

    def _take_down(self) -> None:
        """Undoes what was done to the forward pass."""
        if self._autocast is not None:
            self._autocast.remove()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns ``NAME.value`` per trained tensor, in the dtype that trains; a sharded one in one piece."""
        from finetune.methods.primitives.sharding import whole

        return {f"{name}{VALUE}": whole(parameter) for name, parameter in self._tensors.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Copies the values into the trained tensors; strict."""
        from finetune.methods.primitives.sharding import put_whole

        require_same_shapes({f"{name}{VALUE}": p for name, p in self._tensors.items()}, state)
        for name, parameter in self._tensors.items():
            put_whole(parameter, state[f"{name}{VALUE}"])

    def merge(self) -> nn.Module:
        """Rounds the trained tensors to the base's dtype and returns the model."""
        from finetune.methods.primitives.master_weights import cast_in_place

        self._take_down()
        for name, parameter in self._tensors.items():
            cast_in_place(parameter, self._base_dtypes[name])
        model, self._model, self._names = self.model, None, ()
        return model

    def _chosen(self) -> tuple[str, ...]:
        sizes: dict[str, int] = {}
        for name, parameter in self._tensors.items():
            kind = name.removesuffix(".weight").rpartition(".")[2]
            sizes[kind] = sizes.get(kind, 0) + parameter.numel()
        parts = ", ".join(f"{kind} {size:,}" for kind, size in sizes.items())
        whole = (f"{len(self._tensors)} whole tensors ({parts})",) if self._tensors else ()
        return (*whole, *self._notes())

    def _notes(self) -> tuple[str, ...]:
        tied = [name for name, parameter in self._tensors.items() if self._tied and parameter is _embedding(self.model)]
        return tuple(f"{name} is the input embedding and the output head at once" for name in tied)


def _embedding(model: nn.Module) -> nn.Parameter:
    return model.get_input_embeddings().weight  # type: ignore[operator, no-any-return]
