"""DeepSpeed's ZeRO: optimizer state (1), gradients too (2), weights too (3) are spread over the processes.

DeepSpeed is given the attached model and the optimizer that the trainer has made, not accelerate's switch for it: that
one trains every process on all data, without a word, where there is no accelerator. What the trainer steps, schedules
and saves is an optimizer over the trained parameters as they are, so that the methods' hooks and the checkpoints are
those of one process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from finetune.core.errors import CapabilityError, TrainingError
from finetune.engines.engine import Engine, require_processes

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Trainer

    from finetune.methods import Method

__all__ = ["Zero", "ZeroOptimizer"]

_ENTRYWISE = (Adam, AdamW, SGD, Adagrad, RMSprop)
"""Optimizers that compute every entry by itself, so that they may be given a flat part of several tensors."""
_COUNTS = frozenset({"step"})
"""What an optimizer's state holds once, and not per entry."""


class Zero(Engine):
    """ZeRO over all processes.

    Args:
        processes: How many train.
        stage: 1, 2 or 3.
        config: DeepSpeed's own, without what the recipe says elsewhere.
        offload_weights: Whether shards (stage 3) wait in the CPU's memory until an accelerator computes with them.
        offload_optimizer: Whether the optimizer's state stays in the CPU's memory, and the step is computed there.
    """

    name: ClassVar[str] = "deepspeed"
    owns_model: ClassVar[bool] = True
    together: ClassVar[bool] = True

    def __init__(
        self,
        processes: int,
        *,
        stage: int,
        config: dict[str, Any],
        offload_weights: bool = False,
        offload_optimizer: bool = False,
    ) -> None:
        super().__init__(processes)
        self.stage, self.config = stage, config
        self.head_whole = stage < 3
        self.offload_weights, self.offload_optimizer = offload_weights, offload_optimizer

    def describe(self) -> str:
        """Returns how the model is shared, in a line."""
        spread = ("optimizer state", "optimizer state and gradients", "weights, optimizer state and gradients")
        what = f"deepspeed: ZeRO-{self.stage}, {spread[self.stage - 1]} over {self.processes} processes"
        weights = "; weights wait in the CPU's memory" if self.offload_weights else ""
        return what + weights + ("; optimizer on the CPU" if self.offload_optimizer else "")

    def prepare(self, model: nn.Module, method: Method, device: torch.device) -> None:
        """Moves the model to the device; it is taken apart when the optimizer exists."""
        if device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        model.to(device)
        self._model, self._method, self._device = model, method, device
        self._reached: set[Tensor] = set()

    def take(self, optimizer: Optimizer, *, max_norm: float) -> ZeroOptimizer:
        """Hands the model and its optimizer to DeepSpeed, and returns the optimizer for the trainer.

        Args:
            optimizer: Over the trained parameters, not stepped yet.
            max_norm: Norm that gradients are clipped to; 0: they are not.

        Raises:
            CapabilityError: The optimizer looks at tensors whole.
        """
        if not isinstance(optimizer, _ENTRYWISE):
            raise CapabilityError(
                "ZeRO gives an optimizer flat parts of tensors, and this one looks at whole ones",
                where="train.optim",
                got=type(optimizer).__name__,
                want="adamw_torch, sgd, adagrad or rmsprop",
                fix="train.optim: adamw_torch, or engine.strategy: fsdp",
            )
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)  # its own business
        import deepspeed

        cpu = self._device.type == "cpu"
        if cpu:  # a collective in shared memory, for which the first run would compile C++ for minutes
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo" if cpu else "nccl", auto_mpi_discovery=False, verbose=False)
        for parameter in self._method.trained_parameters().values():
            parameter.register_post_accumulate_grad_hook(self._reached.add)  # type: ignore[no-untyped-call]
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        self.deepspeed, *_ = deepspeed.initialize(
            model=self._model, optimizer=optimizer, config=self._config(max_norm), dist_init_required=False
        )
        self._inner = optimizer
        return ZeroOptimizer(groups, self)

    def _config(self, max_norm: float) -> dict[str, Any]:
        zero = {**self.config.get("zero_optimization", {}), "stage": self.stage}
        if self.offload_optimizer:
            zero.setdefault("offload_optimizer", {"device": "cpu"})
        if self.offload_weights:
            zero.setdefault("offload_param", {"device": "cpu"})
        return {
            # The step is torch's own, also on the CPU: DeepSpeed's would be compiled when it is first used.
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            **self.config,
            # The trainer counts micro-batches and divides by their number.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": max_norm,
            "zero_optimization": zero,
        }

    def network(self, model: nn.Module) -> nn.Module:
        """Returns what a training step calls: DeepSpeed's wrapper prepares the backward pass."""
        network: nn.Module = self.deepspeed
        return network

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Tells DeepSpeed whether the optimizer steps after it."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        yield

    def grad_norm(self) -> float:
        """Returns the norm of the averaged gradients, before they are clipped; after the last micro-batch of a step."""
        zero = self.deepspeed.optimizer
        if self.stage < 3:
            return float(zero.scaled_global_norm())
        return float(torch.linalg.vector_norm(torch.stack(zero._get_norm_groups())))

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Returns whether a backward pass has reached it: ZeRO has taken the gradient itself away by then."""
        return parameter in self._reached

    def step(self, optimizer: ZeroOptimizer) -> None:
        """Steps with the learning rates and the rest of ``optimizer``'s groups."""
        given = (group for group in optimizer.param_groups if group["params"])  # DeepSpeed leaves empty ones out
        for inner, group in zip(self._inner.param_groups, given, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})
        self.deepspeed.step()

    @contextlib.contextmanager
    def whole(self, *, write: bool = False) -> Iterator[None]:
        """Has every process see the trained parameters whole; all of them take part.

        Args:
            write: Whether every process puts the same values into them.
        """
        if self.stage < 3 or not hasattr(self, "deepspeed"):
            yield
            return
        import deepspeed

        trained = list(self._method.trained_parameters().values())
        with deepspeed.zero.GatheredParameters(trained, modifier_rank=0 if write else None):
            yield

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's state gathered onto the CPU."""
        from deepspeed.utils import safe_get_full_optimizer_state

        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held: dict[str, Any] = next((own for own in self._inner.state.values() if own), {})
        state = {
            number: {
                key: _copied(value if key in _COUNTS else safe_get_full_optimizer_state(parameter, key))
                for key, value in held.items()
            }
            for number, parameter in enumerate(parameters)
        }
        return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}

    def place_optimizer_state(self, optimizer: Optimizer) -> None:
        """Keeps this process's part of it, where DeepSpeed looks for it."""
        from deepspeed.utils import safe_get_local_optimizer_state, safe_set_full_optimizer_state

        zero = self.deepspeed.optimizer
        loaded: dict[str, Any] = next(iter(optimizer.state.values()), {})
        for part in zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups:
            self._inner.state[part] = {
                key: _copied(value) if key in _COUNTS else torch.zeros_like(part) for key, value in loaded.items()
            }
        if self.stage < 3:
            zero._lazy_init_hp_params_optimizer_state()
        for parameter, own in optimizer.state.items():
            for key in own.keys() - _COUNTS:
                if self.stage == 3:
                    part = safe_get_local_optimizer_state(parameter, key)
                    flat = F.pad(own[key].flatten(), (0, part.numel() * self.processes - own[key].numel()))
                    part.copy_(flat.chunk(self.processes)[dist.get_rank()])
                else:
                    safe_set_full_optimizer_state(parameter, own[key], key)
        optimizer.state.clear()

    def verify(self, trainer: Trainer) -> None:
        """Checks that DeepSpeed has the trained parameters, and accelerate nothing.

        Raises:
            TrainingError: Accelerate has wrapped the model besides, or DeepSpeed runs at another stage.
        """
        require_processes(trainer, self.processes)
        found = self.deepspeed.zero_optimization_stage()
        if found != self.stage or trainer.accelerator.unwrap_model(trainer.model_wrapped) is not trainer.model_wrapped:
            raise TrainingError(
                "the model is not shared as the recipe says",
                where="engine.deepspeed",
                got=f"ZeRO-{found}, in {type(trainer.model_wrapped).__name__}",
            )


class ZeroOptimizer(Optimizer):
    """Steps through DeepSpeed; its groups hold the trained parameters, its state is kept by DeepSpeed.

    Args:
        groups: As of the optimizer that DeepSpeed was given.
        engine: That gave it.
    """

    def __init__(self, groups: list[dict[str, Any]], engine: Zero) -> None:
        super().__init__(groups, {})
        self._engine = engine

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps on all processes."""
        self._engine.step(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: a step has done it."""


def _copied(value: Any) -> Any:
    return value.cpu().clone() if torch.is_tensor(value) else value
