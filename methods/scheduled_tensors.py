"""Base of the methods that train different blocks of the model at different steps."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from finetune.core.errors import TargetError
from finetune.core.learned_state import TRAINING, VALUE, learned_names, require_same_shapes
from finetune.methods.base import MethodConfig, MethodSummary
from finetune.methods.whole_tensors import WholeTensors, WholeTensorsConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from finetune.methods.primitives.active_tensors import ActiveTensors

__all__ = ["ScheduledTensors", "ScheduledTensorsConfig"]


class ScheduledTensorsConfig(WholeTensorsConfig):
    """What all methods share whose set of trained blocks changes."""

    state: Literal["drop", "offload", "keep"] = Field(
        default="drop",
        description="What becomes of the optimizer's state of a block that rests: dropped, moved to the CPU's memory "
        "until it trains again, or kept where it is.",
    )
    train_embeddings: bool = Field(
        default=False,
        description="Whether the input embedding always trains; the backward pass then goes through all layers.",
    )
    train_head: bool = Field(
        default=False, description="Whether the output head always trains; a tied one is the embedding."
    )
    train_norm: bool = Field(default=True, description="Whether the norm after the last layer always trains.")


class ScheduledTensors(WholeTensors):
    """Trains the blocks that :meth:`active_blocks` names, a pure function of the optimizer step.

    Every parameter that will ever train requires a gradient until the first training forward pass, so that optimizers
    and distributed wrappers built before it know all of them; from then on only the active blocks do. The set changes
    right after an optimizer step. A resting block has no gradient and, with ``state: drop``, no optimizer state; with a
    16-bit base, float32 masters exist of what is active only. A checkpoint holds the step, and the tensors that have
    been active.
    """

    takes_turns: ClassVar[bool] = True
    Config: ClassVar[type[MethodConfig]] = ScheduledTensorsConfig
    config: ScheduledTensorsConfig

    @abstractmethod
    def active_blocks(self, step: int) -> frozenset[int]:
        """Returns the blocks that train in the optimizer step after ``step`` steps."""

    @property
    def blocks(self) -> int:
        """Number of transformer blocks of the model."""
        return len(self._blocks)

    def choose(self, model: nn.Module, candidates: frozenset[str]) -> Sequence[str]:
        """Returns the parameters of all blocks, and those that always train."""
        from finetune.methods.primitives.blocks import final_norm_names, find_blocks
        from finetune.methods.primitives.parameter_patterns import parameter_kinds

        try:
            place, blocks = find_blocks(model)
        except LookupError as error:
            raise TargetError(f"{self.name} finds no transformer layers", got=str(error)) from error
        names = [name for name, _ in model.named_parameters() if name in candidates]
        heads = [f"{place}.{number}." for number in range(len(blocks))]
        blocks_of = (frozenset(name for name in names if name.startswith(head)) for head in heads)
        # After a method that leaves few layers to choose from, only these take turns.
        self._blocks = [block for block in blocks_of if block]
        if not self._blocks:
            raise TargetError(
                f"no parameter of the {len(blocks)} layers is left for {self.name}", fix="widen the methods before it"
            )
        kinds = parameter_kinds(model)
        asked = {"embed": self.config.train_embeddings, "head": self.config.train_head}
        always = {name for name in names if any(wanted and kind in kinds[name] for kind, wanted in asked.items())}
        if self.config.train_norm:
            always |= set(final_norm_names(model, place)) & set(names)
        self._always = frozenset(always)
        wanted = self._always.union(*self._blocks)
        return [name for name in names if name in wanted]

    def active(self, step: int) -> frozenset[str]:
        """Returns the names of the parameters that train in the optimizer step after ``step`` steps."""
        return self._always.union(*(self._blocks[number] for number in self.active_blocks(step)))

    def _set_up(self, model: nn.Module) -> None:
        from finetune.methods.primitives.active_tensors import ActiveTensors

        if self._is_scheduled():
            self.active_blocks(0)  # refuses what the model has not
        wide = self.config.trainable_dtype == "float32"
        self._active: ActiveTensors = ActiveTensors(model, self._names, self.active, wide=wide, rest=self.config.state)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Returns every parameter that will ever train: optimizers are built over all of them."""
        return self._tensors

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns name and shape of what trains at the first step."""
        return {name: tuple(self._tensors[name].shape) for name in self._first()}

    def touched(self) -> frozenset[str]:
        """Returns the names of all that will ever train."""
        return frozenset(self._names)

    def saved_scalars(self) -> int:
        """Returns the size of what has been active."""
        return sum(self._tensors[name].numel() for name in self._active.ever)

    def summary(self) -> MethodSummary:
        """Returns what trains at a time."""
        trained = [self._tensors[name] for name in self._first()]
        size = sum(parameter.numel() for parameter in trained)
        width = 4 if self.config.trainable_dtype == "float32" else trained[0].element_size()
        return dataclasses.replace(super().summary(), trained=size, trained_bytes=size * width)

    def _first(self) -> list[str]:
        active = self.active(self._active.step) if self._is_scheduled() else frozenset(self._names)
        return [name for name in self._names if name in active]

    def _is_scheduled(self) -> bool:
        """Returns whether all is known that the schedule depends on."""
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """Returns ``NAME.value`` of what has been active, in its dtype of now, and what resuming needs besides."""
        from finetune.methods.primitives.sharding import whole

        ever = [name for name in self._names if name in self._active.ever]
        state = {f"{name}{VALUE}": whole(self._tensors[name]) for name in ever}
        return {**state, **self._active.state_dict(TRAINING)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores values and the place in the schedule; strict."""
        ever = self._active.ever_of(state, TRAINING)
        values = {name: state[f"{name}{VALUE}"] for name in learned_names(state) if f"{name}{VALUE}" in state}
        require_same_shapes({name: self._tensors[name] for name in ever}, values)
        self._active.load(values, state, TRAINING)

    def _share_that_always_trains(self) -> tuple[str, ...]:
        always = sum(self._tensors[name].numel() for name in self._always)
        return (f"{always:,} parameters always train: {', '.join(sorted(self._always))}",) if always else ()

    def _take_down(self) -> None:
        self._active.remove()
