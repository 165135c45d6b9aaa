"""Tensors that take turns: which of them require a gradient changes from one optimizer step to the next."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from finetune.core.errors import CapabilityError, CheckpointError
from finetune.methods.primitives.master_weights import AutocastForward, cast_in_place
from finetune.methods.primitives.process_group import processes, require_same_over_processes
from finetune.methods.primitives.sharding import put_whole, whole
from finetune.methods.primitives.step_sync import after_optimizer_step

__all__ = ["ActiveTensors"]

_STEP, _EVER, _RESTING = "step", "ever", "resting/"
_NARROW = (torch.bfloat16, torch.float16)


class ActiveTensors:
    """Lets the active ones of some parameters train, in any loop.

    Args:
        model: The whole model; its first training forward pass freezes what rests.
        names: All that will ever be active.
        active: Step -> names of those that train in the step after so many; the same in every process.
        wide: Whether an active tensor is float32 where it rests in 16 bits.
        rest: What becomes of the optimizer's state of a tensor that rests.

    Attributes:
        step: Optimizer steps taken.
        ever: Names of those that have been active in a step taken or under way.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Collection[str],
        active: Callable[[int], frozenset[str]],
        *,
        wide: bool,
        rest: Literal["drop", "offload", "keep"],
    ) -> None:
        self.step = 0
        self.ever: set[str] = set()
        self._model, self._all, self._names, self._rest = model, tuple(names), active, rest
        self._dtypes = {name: parameter.dtype for name, parameter in self._tensors.items()}
        self._now: frozenset[str] | None = None
        self._resting: dict[str, dict[str, Any]] = {}
        narrow = next((dtype for dtype in self._dtypes.values() if dtype in _NARROW), None) if wide else None
        self._autocast = None if narrow is None else AutocastForward([model], narrow)
        self._handles = [
            model.register_forward_pre_hook(self._begin),
            after_optimizer_step(self._held, self._advance),
        ]

    @property
    def _tensors(self) -> dict[str, nn.Parameter]:
        """All of them, as the modules hold them now: FSDP2 puts shards in their place."""
        return {name: self._model.get_parameter(name) for name in self._all}

    def _held(self) -> Iterable[nn.Parameter]:
        return self._tensors.values()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._now is None and module.training and torch.is_grad_enabled():
            if self._autocast is not None and processes() > 1:
                raise CapabilityError(
                    "blocks that take turns have one dtype where several processes train: their float32 masters would "
                    "come and go behind the back of what averages the gradients",
                    where="method.trainable_dtype",
                    fix="model.dtype: float32, or method.trainable_dtype: base",
                )
            self._switch(None)

    def _advance(self, optimizer: Optimizer) -> None:
        # A gradient scaler lets a fused optimizer skip the step within itself.
        skipped = getattr(optimizer, "found_inf", None)
        if self._now is None or (skipped is not None and bool(skipped)):
            return
        self.step += 1
        if self._names(self.step) != self._now:
            self._switch(optimizer)

    @torch.no_grad()
    def _switch(self, optimizer: Optimizer | None) -> None:
        before = self._now if self._now is not None else frozenset(self._all)
        active = self._names(self.step)
        if processes() > 1:
            self._require_agreement(active)
        for name in before - active:
            self._put_to_rest(name, optimizer)
        for name in active:
            self._wake(name, optimizer)
        self._now = active
        self.ever |= active

    def _put_to_rest(self, name: str, optimizer: Optimizer | None) -> None:
        parameter = self._model.get_parameter(name)
        # A gradient of zero is no rest: momentum and weight decay would go on.
        parameter.grad = None
        parameter.requires_grad_(False)
        if self._autocast is not None and self._now is not None:
            cast_in_place(parameter, self._dtypes[name])
        if optimizer is None or self._rest == "keep":
            return
        state: dict[str, Any] = optimizer.state.pop(parameter, {})
        if self._rest == "offload" and state:
            self._resting[name] = _moved(state, torch.device("cpu"))

    def _wake(self, name: str, optimizer: Optimizer | None) -> None:
        parameter = self._model.get_parameter(name)
        if self._autocast is not None and parameter.dtype in _NARROW:
            cast_in_place(parameter, torch.float32)
        parameter.requires_grad_(True)
        if optimizer is not None and name in self._resting:
            optimizer.state[parameter] = _moved(self._resting.pop(name), parameter.device)

    def _require_agreement(self, active: Collection[str]) -> None:
        """Sees that every process changes to the same set, and that what trained until now is the same everywhere."""
        digest = hashlib.sha256(" ".join(sorted(active)).encode())
        for name in sorted(self._now or self._all):
            tensor = self._model.get_parameter(name)
            if not isinstance(tensor, DTensor):
                digest.update(tensor.detach().double().sum().cpu().numpy().tobytes())
        require_same_over_processes(digest.digest(), "the blocks that take turns", tensor.device)

    def state_dict(self, prefix: str) -> dict[str, Tensor]:
        """Returns the place in the schedule, and the optimizer's state that rests here."""
        ever = torch.tensor([name in self.ever for name in self._all], dtype=torch.uint8)
        state = {f"{prefix}{_STEP}": torch.tensor(self.step), f"{prefix}{_EVER}": ever}
        for name, resting in self._resting.items():
            state |= {f"{prefix}{_RESTING}{name}/{key}": whole(value) for key, value in resting.items()}
        return state

    def ever_of(self, state: Mapping[str, Tensor], prefix: str) -> list[str]:
        """Returns the names of those that have been active in a state that :meth:`state_dict` returned.

        Raises:
            CheckpointError: It does not say so for these tensors, or others have been active here since.
        """
        missing = [key for key in (f"{prefix}{_STEP}", f"{prefix}{_EVER}") if key not in state]
        ever = [] if missing else state[f"{prefix}{_EVER}"].tolist()
        if len(ever) != len(self._all):
            raise CheckpointError(
                "the learned state does not say which of these tensors have trained, and for how long",
                where=", ".join(missing) or f"{prefix}{_EVER}",
                got="missing" if missing else f"{len(ever)} tensors",
                want=f"{len(self._all)} tensors",
                fix="attach with the config and base that the state was trained with",
            )
        names = [name for name, was in zip(self._all, ever, strict=True) if was]
        later = sorted(self.ever.difference(names))
        if later:
            raise CheckpointError(
                "the model has trained further than the learned state, which does not hold what other blocks were",
                where=", ".join(later[:3]),
                fix="load it into a fresh base model",
            )
        return names

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor], state: Mapping[str, Tensor], prefix: str) -> None:
        """Restores values by name, in the dtype in which they were trained, and :meth:`state_dict`.

        The next training forward pass freezes what rests: optimizers may be built before it.
        """
        for name, value in values.items():
            parameter = self._model.get_parameter(name)
            cast_in_place(parameter, value.dtype if self._autocast is not None else parameter.dtype)
            put_whole(parameter, value)
        self.step, self.ever, self._now = int(state[f"{prefix}{_STEP}"]), set(values), None
        self._resting = {}
        for key, value in state.items():
            if key.startswith(f"{prefix}{_RESTING}"):
                name, _, part = key.removeprefix(f"{prefix}{_RESTING}").rpartition("/")
                self._resting.setdefault(name, {})[part] = value.clone()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model keeps its dtypes, and has no business with the schedule.
        return {**self.__dict__, "_names": None, "_handles": [], "_now": frozenset()}

    def remove(self) -> None:
        """Lets all of them train again and forgets the schedule."""
        for handle in self._handles:
            handle.remove()
        if self._autocast is not None:
            self._autocast.remove()


def _moved(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    # A count of steps is small, and stays where the optimizer had it.
    return {
        key: value.to(device) if isinstance(value, Tensor) and value.ndim else value for key, value in state.items()
    }
