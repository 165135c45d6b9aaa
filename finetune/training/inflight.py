"""Checks during training: that something trains, that nothing else does, that the run can be interrupted."""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.core.errors import TrainingError
from finetune.engines.engine import Engine

if TYPE_CHECKING:
    from torch import Tensor, nn

    from finetune.methods import Method

__all__ = ["InFlightChecks", "StopOnSignal"]

_FROZEN_SAMPLED = 16
_VALUES_SAMPLED = 1024


class InFlightChecks(TrainerCallback):
    """Ends a run that trains nothing, or something else than declared, within its first steps.

    After the first backward every trained parameter must have a gradient (F1); that it is finite the trainer checks at
    every step. Some steps later the trained parameters must have moved, and a sample of the frozen ones must not have;
    the frozen ones are checked again at every save (F2).

    Args:
        method: The attached method.
        after: Optimizer steps of this process after which F2 is checked; a shorter run is checked at its end.
        engine: How the processes share the model; None: one process.
    """

    def __init__(self, method: Method, after: int = 3, engine: Engine | None = None) -> None:
        self._method = method
        self._engine = engine or Engine(1)
        self._after = after
        self._steps = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Checks what the optimizer holds (P5, P6) and remembers a sample of the trained and of the frozen values."""
        self._trained = self._method.trained_parameters()
        _check_optimizer(kwargs["optimizer"], self._trained)
        touched = self._method.touched()
        frozen = {
            name: p
            for name, p in self._method.model.named_parameters()
            if not p.requires_grad and name not in touched and p.numel()
        }
        every = max(1, len(frozen) // _FROZEN_SAMPLED)
        self._frozen = dict(list(frozen.items())[::every])
        with self._engine.whole():
            self._learned_before = {name: _sample(t) for name, t in self._method.learned_tensors().items()}
        self._frozen_before = {name: _sample(p) for name, p in self._frozen.items()}

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Checks the gradients of the first step (F1)."""
        if self._steps:
            return
        # Of parameters that take turns, those that rest now require none.
        resting = self._method.at_rest()
        without = [
            name
            for name, parameter in self._trained.items()
            if parameter.requires_grad and name not in resting and not self._engine.has_gradient(parameter)
        ]
        if without:
            raise TrainingError(
                f"{len(without)} of {len(self._trained)} trained parameters got no gradient",
                where=", ".join(without[:10]),
                fix="targets that the forward pass uses",
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Checks what moved (F2)."""
        self._steps += 1
        if self._steps != min(self._after, state.max_steps):
            return
        # Of parameters that take turns, those that rest now are not listed any more.
        with self._engine.whole():
            learned = {**self._trained, **self._method.learned_tensors()}
            still = all(torch.equal(_sample(learned[name]), before) for name, before in self._learned_before.items())
        if still:
            raise TrainingError(
                f"training does not change the model: no trained parameter moved in {self._steps} steps",
                got=f"learning rate {args.learning_rate}",
                fix="a higher train.learning_rate, or float32 trained parameters",
            )
        self._check_frozen()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Checks what must not have moved (F2)."""
        self._check_frozen()

    def _check_frozen(self) -> None:
        changed = [name for name, p in self._frozen.items() if not torch.equal(_sample(p), self._frozen_before[name])]
        if changed:
            raise TrainingError("frozen weights changed", where=", ".join(changed[:10]))


class StopOnSignal(TrainerCallback):
    """On SIGTERM or Ctrl-C: finish the step, write a checkpoint, stop. A second signal ends the process at once.

    Attributes:
        received: The signal, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the two signals over."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Asks for a checkpoint and the end, on all processes at the same step."""
        if self._anyone_received(args.device):
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gives the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for known, handler in self._previous.items():
            signal.signal(known, handler)

    def _anyone_received(self, device: torch.device) -> bool:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            flag = torch.tensor(float(self.received is not None), device=device)
            torch.distributed.all_reduce(flag)
            return bool(flag.item())
        return self.received is not None


def _check_optimizer(optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter]) -> None:
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    names = {id(parameter): name for name, parameter in trained.items()}
    missing = [name for key, name in names.items() if held.count(key) != 1]
    strangers = len(set(held) - names.keys())
    if missing or strangers:
        raise TrainingError(
            "the optimizer does not hold just the trained parameters, each once",
            where=", ".join(missing[:10]),
            got=f"{len(missing)} not held once, {strangers} that are not declared",
            fix="attach the method before the optimizer is built",
        )


@torch.no_grad()
def _sample(tensor: Tensor) -> Tensor:
    # Of a tensor that FSDP2 has taken apart, what this process has.
    flat = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
    # In float32: what trains may get a float32 master on the way.
    return flat[:: max(1, flat.numel() // _VALUES_SAMPLED)].float().clone()
