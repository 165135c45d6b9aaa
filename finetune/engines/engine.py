"""What an engine is: how the processes of a run share a model. The plain one leaves it all to accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from finetune.core.errors import TrainingError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from transformers import Trainer

    from finetune.methods import Method

__all__ = ["Engine", "require_processes"]


class Engine:
    """One process, or several with the model wrapped in ``DistributedDataParallel`` by accelerate.

    Args:
        processes: How many train.

    Attributes:
        owns_model: Whether the engine places the model and averages its gradients, so that accelerate must do neither.
        together: Whether every process has to take part in each forward pass and in each save.
        head_whole: Whether the output head's weight can be read outside its forward pass.
    """

    name: ClassVar[str] = "ddp"
    owns_model: ClassVar[bool] = False
    together: ClassVar[bool] = False
    head_whole: bool = True

    def __init__(self, processes: int) -> None:
        self.processes = processes

    def describe(self) -> str:
        """Returns how the model is shared, in a line."""
        if self.processes == 1:
            return "one process"
        return f"ddp: {self.processes} processes, each with the whole model"

    def prepare(self, model: nn.Module, method: Method, device: torch.device) -> None:
        """Places the model to which ``method`` is attached; before the trainer is built."""

    def settle(self) -> None:
        """Puts back what a forward pass without a backward pass left gathered; before anything is written."""

    def begin(self) -> None:
        """Checks that the processes agree; the optimizer exists."""

    def take(self, optimizer: Optimizer, *, max_norm: float) -> Optimizer:
        """Returns what the trainer steps: ``optimizer``, over the trained parameters, or what stands for it.

        Args:
            optimizer: Not stepped yet.
            max_norm: Norm that gradients are clipped to; 0: they are not.
        """
        return optimizer

    def network(self, model: nn.Module) -> nn.Module:
        """Returns what a training step calls in place of ``model``."""
        return model

    def grad_norm(self) -> float | None:
        """Returns the norm of the averaged gradients where the engine clips them itself."""
        return None

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Returns whether the backward passes of this step reached a parameter that trains."""
        return parameter.grad is not None

    @contextlib.contextmanager
    def whole(self, *, write: bool = False) -> Iterator[None]:
        """Has every process see the trained parameters as the method saves and loads them; all of them take part.

        Args:
            write: Whether every process puts the same values into them.
        """
        yield

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Surrounds a forward and a backward pass.

        Args:
            last: Whether the optimizer steps after it.
        """
        yield

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's state in one piece; every process of an engine that works together calls it."""
        return optimizer.state_dict()

    def place_optimizer_state(self, optimizer: Optimizer) -> None:
        """Makes a state in one piece, which the optimizer has just loaded, this process's own."""

    def verify(self, trainer: Trainer) -> None:
        """Checks what accelerate made of the arguments: it falls back in silence.

        Raises:
            TrainingError: Fewer processes train together than were started, or not as asked.
        """
        require_processes(trainer, self.processes)
        expected = "NO" if self.processes == 1 else "MULTI_"
        found = trainer.accelerator.distributed_type
        if not found.name.startswith(expected):
            raise TrainingError(
                "accelerate does not train as the recipe says",
                where="engine.strategy",
                got=found.name,
                want="DistributedDataParallel" if self.processes > 1 else "one process",
                fix="no ACCELERATE_... variables in the environment: finetune train RECIPE --nproc N sets its own",
            )


def require_processes(trainer: Trainer, processes: int) -> None:
    """Checks that as many processes train together as were started.

    Raises:
        TrainingError: Fewer do.
    """
    found = trainer.args.world_size
    if found != processes or trainer.accelerator.num_processes != processes:
        raise TrainingError(
            "the processes do not train together",
            got=f"{found} of them by the training arguments, {trainer.accelerator.num_processes} by accelerate",
            want=f"{processes}, as the launcher says (WORLD_SIZE)",
            fix="finetune train RECIPE --nproc N, or torchrun -m finetune",
        )
