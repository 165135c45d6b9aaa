"""Makes the checkpoints of stock ``transformers.Trainer`` hold a method's own state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from finetune.core.errors import CapabilityError, CheckpointError
from finetune.methods.state import has_method_state

if TYPE_CHECKING:
    from finetune.methods.base import Method

__all__ = ["EarlyStop", "MethodCallback"]


class EarlyStop(TrainerCallback):
    """Lets the backward pass end at the lowest trained block when activations are computed again.

    transformers makes the output of the embedding require a gradient then, so that the backward pass goes through every
    block, trained or not. Only the reentrant form of recomputation needs that.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the gradient off the embedding's output."""
        options: Any = args.activation_checkpointing_kwargs or {}
        if args.activation_checkpointing and not options.get("use_reentrant", False):
            model = kwargs["model"]
            (model.get_base_model() if hasattr(model, "get_base_model") else model).disable_input_require_grads()


class MethodCallback(EarlyStop):
    """Writes the method's state into each checkpoint, and restores it when training goes on from one.

    The trainer restores a callback's own state only on request and only as JSON, so the state lies in files.

    Args:
        method: The attached method.
    """

    def __init__(self, method: Method) -> None:
        self.method = method

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the state, unless whoever wrote the checkpoint did so."""
        folder = _checkpoint(args, state)
        if state.is_world_process_zero and not has_method_state(folder):
            self.method.save(folder)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tells the method how long the run is, and restores the state that belongs to the step to go on from.

        Raises:
            CapabilityError: The method cannot train under these arguments.
            CheckpointError: Neither the output folder nor ``args.resume_from_checkpoint`` holds the state.
        """
        super().on_train_begin(args, state, control, **kwargs)
        self.method.check_arguments(args)
        if args.deepspeed is not None and self.method.takes_turns:
            raise CapabilityError(
                f"{self.method.name} lets parameters take turns, and DeepSpeed keeps the state of all of them",
                where="train.deepspeed",
                fix="one process or DistributedDataParallel, or a method whose set stays",
            )
        self.method.bind(total_steps=state.max_steps)
        if state.global_step == 0:
            return
        # The trainer does not tell a callback which folder it was given.
        given = [Path(args.resume_from_checkpoint)] if isinstance(args.resume_from_checkpoint, str) else []
        folders = [*given, _checkpoint(args, state)]
        found = next((folder for folder in folders if has_method_state(folder)), None)
        if found is None:
            raise CheckpointError(
                f"the checkpoint holds no state of {self.method.name!r}",
                where=str(folders[0]),
                fix="pass callbacks=method.callbacks() to the trainer that writes the checkpoints",
            )
        self.method.load(found)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
