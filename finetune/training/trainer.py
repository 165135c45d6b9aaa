"""Stock ``transformers.Trainer`` with small whole checkpoints, its own order, and a stop at the first bad step."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from finetune.core.errors import TrainingError
from finetune.training.checkpoint import complete_checkpoint, rotate, verify_tensors
from finetune.training.sampler import EpochSampler

if TYPE_CHECKING:
    from torch import nn

    from finetune.methods import Method

__all__ = ["FinetuneTrainer"]

_STAGING = ".saving"


class FinetuneTrainer(Trainer):
    """Saves and loads through the method, so that a checkpoint is O(trained) whatever the method is.

    Args:
        method: The attached method.
        sampler: The order of the examples.
        identity: What a checkpoint must agree with to be resumed.
        **kwargs: As for ``transformers.Trainer``.
    """

    def __init__(self, *, method: Method, sampler: EpochSampler, identity: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.method = method
        self.sampler = sampler
        self.identity = identity
        self._staging: Path | None = None

    @property
    def rows_per_step(self) -> int:
        """Examples of one optimizer step over all processes."""
        return int(self.get_total_train_batch_size(self.args))

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the data; the last may be short."""
        return math.ceil(len(self.sampler) / self.rows_per_step)

    def tokens(self, step: int) -> int:
        """Returns the tokens, without padding, that the first ``step`` optimizer steps saw."""
        return self.sampler.tokens(step, rows_per_step=self.rows_per_step, steps_per_epoch=self.steps_per_epoch)

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        return self.sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # accelerate does not reach a sampler under the wrapper that skips batches on resume.
        self.sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Stops before the optimizer step where the gradient is not finite: no healthy state is ever overwritten."""
        if grad_norm is None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            grad_norm = torch.nn.utils.get_total_norm(gradients)
        norm = float(grad_norm)
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
        if self.args.should_save:
            self.method.save(Path(str(output_dir or self.args.output_dir)))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.method.load(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self.method.load(Path(str(self.state.best_model_checkpoint)))
