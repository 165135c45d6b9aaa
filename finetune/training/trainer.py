"""Stock ``transformers.Trainer`` with small whole checkpoints, its own order, and a stop at the first bad step."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from finetune.core.errors import TrainingError
from finetune.training.checkpoint import complete_checkpoint, rotate, verify_tensors
from finetune.training.sampler import EpochSampler

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from finetune.engines.engine import Engine
    from finetune.methods import Method
    from finetune.offload.activations import OffloadedActivations

__all__ = ["FinetuneTrainer"]

_STAGING = ".saving"


class FinetuneTrainer(Trainer):
    """Saves and loads through the method, so that a checkpoint is O(trained) whatever the method is.

    Args:
        method: The attached method.
        sampler: The order of the examples.
        identity: What a checkpoint must agree with to be resumed.
        engine: How the processes share the model, which is prepared.
        activations: What puts them away between forward and backward pass, or None.
        **kwargs: As for ``transformers.Trainer``.
    """

    def __init__(
        self,
        *,
        method: Method,
        sampler: EpochSampler,
        identity: dict[str, Any],
        engine: Engine,
        activations: OffloadedActivations | None = None,
        **kwargs: Any,
    ) -> None:
        self.engine = engine
        self.activations = activations
        super().__init__(**kwargs)
        # What transformers does for a model that it sharded while loading it is what an engine that owns the model
        # needs: no wrapper, no second sharding, an optimizer over the parameters as they are.
        self.is_distributed_loading_by_transformers = engine.owns_model
        self.method = method
        self.sampler = sampler
        self.identity = identity
        self._staging: Path | None = None

    @property
    def rows_per_step(self) -> int:
        """Examples of one optimizer step over all processes, each counted once."""
        return int(self.get_total_train_batch_size(self.args)) // self.method.same_rows

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the data; the last may be short."""
        return math.ceil(len(self.sampler) / int(self.get_total_train_batch_size(self.args)))

    def tokens(self, step: int) -> int:
        """Returns the tokens, without padding, that the first ``step`` optimizer steps saw."""
        return self.sampler.tokens(step, rows_per_step=self.rows_per_step, steps_per_epoch=self.steps_per_epoch)

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        return self.sampler

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """Builds the optimizer, and has the engine take it."""
        if self.optimizer is None:
            self.optimizer = self.engine.take(
                super().create_optimizer(*args, **kwargs), max_norm=self.args.max_grad_norm
            )
        return self.optimizer

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.engine.owns_model:
            super()._move_model_to_device(model, device)

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        self.engine.begin()

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        yield  # the engine knows which micro-batch is the last

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.engine.verify(self)
        return prepared

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Runs a micro-batch; after the last one of a step the gradients are those of all processes."""
        with self.engine.micro_batch(last=self.accelerator.sync_gradients):
            loss: Tensor = super().training_step(self.engine.network(model), *args, **kwargs)
        return loss

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs a forward pass; what it keeps for the backward pass may wait elsewhere."""
        away = contextlib.nullcontext() if self.activations is None else self.activations.forward()
        with away:
            return super().compute_loss(model, *args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # accelerate does not reach a sampler under the wrapper that skips batches on resume.
        self.sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        norm = self.engine.grad_norm()
        return super()._clip_grad_norm(model) if norm is None else norm  # type: ignore[no-untyped-call]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Stops before the optimizer step where the gradient is not finite: no healthy state is ever overwritten."""
        if grad_norm is None:
            grad_norm = self.engine.grad_norm()
        if grad_norm is None and self.engine.together:
            grad_norm = super()._get_grad_norm(model)  # type: ignore[no-untyped-call]
        elif grad_norm is None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            grad_norm = torch.nn.utils.get_total_norm(gradients)
        norm = float(grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm)
        if not math.isfinite(norm):
            step = self.state.global_step
            rows = self.sampler.rows(step, rows_per_step=self.rows_per_step, steps_per_epoch=self.steps_per_epoch)
            raise TrainingError(
                f"the gradient of step {step + 1} is not finite, so the step was not taken",
                where=f"training examples {', '.join(map(str, sorted(rows)[:16]))}",
                got=f"gradient norm {norm}",
                fix="a lower train.learning_rate, or look at these examples with finetune data inspect",
            )
        return norm

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run = Path(str(self.args.output_dir))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.state.best_global_step:
            self.state.best_model_checkpoint = str(run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
        self._staging = run / _STAGING
        try:
            if self.args.should_save:
                shutil.rmtree(self._staging, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                staged = self._staging / name
                verify_tensors(staged, at_least=self.method.saved_scalars())
                complete_checkpoint(staged, run, self.identity)
                rotate(run, keep=self.args.save_total_limit, best=self.state.best_model_checkpoint)
        finally:
            if self.args.should_save:
                shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with self.engine.whole():
            if self.args.should_save:
                self.method.save(Path(str(output_dir or self.args.output_dir)))
            elif self.engine.together:
                self.method.state_dict()  # what the first process saves is gathered from all of them

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.engine.together:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        state = self.engine.optimizer_state(self.optimizer)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            assert self.optimizer is not None
            self.engine.place_optimizer_state(self.optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.engine.settle()
        with self.engine.whole(write=True):
            self.method.load(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self.engine.settle()
        with self.engine.whole(write=True):
            self.method.load(Path(str(self.state.best_model_checkpoint)))
