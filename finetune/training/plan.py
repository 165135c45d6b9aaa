"""What a recipe comes to: tokenizer, data, model, method and training arguments, all checked before the first step."""

from __future__ import annotations

import logging
import math
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from finetune.core.errors import CapabilityError, ConfigError, DataError, FinetuneError, FinetuneWarning
from finetune.core.fingerprint import count_parameters
from finetune.data.collate import PackingCollator, PaddingCollator
from finetune.data.prepare import PreparedData, prepare_dataset, split_eval
from finetune.engines.choose import choose_engine, resolve_strategy
from finetune.engines.engine import Engine
from finetune.methods import Method, build_method
from finetune.models import load_config, load_model, load_tokenizer
from finetune.models.dtype import best_attention, resolve_device
from finetune.models.load import resolve_dtype
from finetune.offload import BlockStreamer, load_streamed
from finetune.planning.host import available_memory
from finetune.training.activations import check_activations
from finetune.training.streaming import STREAMED, check_streamed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from finetune.config.schema import Recipe

__all__ = ["Plan", "make_plan"]

_DEFAULTS = {"logging_steps": 10}
"""Where our default of a training argument differs from transformers': a short run shows its loss."""


@dataclass
class Plan:
    """Everything that a run needs, and what identifies it.

    Attributes:
        recipe: The resolved recipe.
        tokenizer: With the chat template that the run uses.
        train: Training examples.
        calibration: Examples that methods choose by.
        evaluation: Held-out examples, or None.
        model: The base model, before the method is attached.
        method: Not attached yet.
        arguments: For the trainer.
        engine: How the processes share the model.
        streamer: What brings the model's blocks in, where they stay on disk.
        attached: What trains, after :meth:`attach`.
    """

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    train: PreparedData
    calibration: PreparedData
    evaluation: PreparedData | None
    model: PreTrainedModel
    method: Method
    arguments: TrainingArguments
    engine: Engine
    streamer: BlockStreamer | None = None
    attached: nn.Module | None = None

    def attach(self, learned: Path | None = None) -> nn.Module:
        """Attaches the method and returns the model to train.

        Args:
            learned: A checkpoint to go on from: what was chosen by data is read from it and not chosen again.
        """
        # The method's random initialisation must not depend on what was drawn before, an evaluation for example.
        transformers.set_seed(self.recipe.seed)
        by_data = (
            self.method.calibration_examples(len(self.calibration.dataset)) > 0 and self.model.device.type != "meta"
        )
        if by_data and learned is not None:
            self.attached = self.method.attach(self.model, learned=learned)
        else:
            self.attached = self.method.attach(self.model, calibration=self._calibration() if by_data else None)
        self.method.bind(total_steps=self.steps)
        return self.attached

    def _calibration(self) -> list[dict[str, Tensor]]:
        """Returns batches of a seeded sample of the calibration examples, as many as the method asks for."""
        import torch

        dataset = self.calibration.dataset
        wanted = min(len(dataset), self.method.calibration_examples(len(dataset)))
        generator = torch.Generator().manual_seed(self.recipe.seed)
        rows = sorted(torch.randperm(len(dataset), generator=generator)[:wanted].tolist())
        size, collate = self.arguments.per_device_train_batch_size, self.collator()
        return [collate([dataset[row] for row in rows[start : start + size]]) for start in range(0, wanted, size)]

    def collator(self) -> PackingCollator | PaddingCollator:
        """Returns what makes batches of the examples."""
        return PackingCollator() if self.recipe.data.packing else PaddingCollator(self.tokenizer.pad_token_id)

    @property
    def rows_per_step(self) -> int:
        """Examples of one optimizer step over all processes, each counted once."""
        arguments = self.arguments
        batches = arguments.gradient_accumulation_steps * max(1, arguments.world_size)
        return int(arguments.per_device_train_batch_size * batches) // self.method.same_rows

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.arguments.max_steps > 0:
            return int(self.arguments.max_steps)
        return math.ceil(math.ceil(len(self.train.dataset) / self.rows_per_step) * self.arguments.num_train_epochs)

    def identity(self) -> dict[str, Any]:
        """Returns what must be the same for a checkpoint to be resumed (P17); the method must be attached."""
        arguments, metadata = self.arguments, self.method.metadata()
        same = ("learning_rate", "lr_scheduler_type", "warmup_steps", "num_train_epochs", "max_steps", "weight_decay")
        return {
            "method": metadata["method"],
            "method_config": metadata["config"],
            "base_fingerprint": metadata["base_fingerprint"],
            "base_dtype": metadata["base_dtype"],
            "data_fingerprint": self.train.fingerprint,
            "seed": self.recipe.seed,
            "rows_per_step": self.rows_per_step,
            "optimizer": str(arguments.optim.value if hasattr(arguments.optim, "value") else arguments.optim),
            "schedule": {name: str(getattr(arguments, name)) for name in same},
        }


def make_plan(recipe: Recipe, *, meta: bool = False, limit: int | None = None) -> Plan:
    """Loads and checks everything up to the model; the method is built but not attached.

    Args:
        recipe: The resolved recipe.
        meta: Builds the model without weights.
        limit: Prepares at most so many training examples.

    Raises:
        FinetuneError: Whatever is wrong with the recipe, the data, the model or the method.
    """
    transformers.set_seed(recipe.seed)
    method = build_method(recipe.method)
    section = recipe.model
    source: dict[str, Any] = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
    config = load_config(section.name_or_path, **source)
    _check_quantised(config, method)
    tokenizer = load_tokenizer(section.name_or_path, chat_template=recipe.data.chat_template, **source)
    arguments = _training_arguments(recipe, method)
    method.check_arguments(arguments)
    text_config = config.get_text_config()
    train, calibration, evaluation = _prepare(recipe, tokenizer, text_config, limit, method)
    _check_batches(train, arguments)
    asked = _asked(recipe, calibration, evaluation) if method.routes else {}
    method.name_tasks(train.tasks, asked=asked)
    device = resolve_device(section.device)
    dtype = resolve_dtype(section.dtype, device)
    size = _check_targets(recipe, source, train.tasks)
    engine = _engine(recipe, arguments, method, weights=size * dtype.itemsize, device=device)
    attention = section.attn_implementation
    if attention == "auto":
        heads = text_config.num_attention_heads
        attention = best_attention(
            device=device,
            dtype=dtype,
            batch=arguments.per_device_train_batch_size,
            heads=heads,
            head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // heads,
            length=max(1, train.tokens // train.examples),
        )
    streamer = None
    stored = recipe.engine.offload.weights
    if stored in STREAMED:
        check_streamed(method, arguments, device)
    check_activations(recipe.engine.offload, engine, device)
    if stored not in STREAMED or meta:
        model = load_model(
            section.name_or_path,
            dtype=str(dtype).removeprefix("torch."),
            attn_implementation=attention,
            device="cpu" if engine.together else section.device,
            tied=section.tied,
            meta=meta,
            **source,
        )
    else:
        model, streamer = load_streamed(
            section.name_or_path,
            dtype=section.dtype,
            attn_implementation=attention,
            tied=section.tied,
            source=cast(Any, stored),
            slots=recipe.engine.offload.slots,
            **source,
        )
    _check_precision(model, arguments)
    _check_recomputation(method, arguments)
    return Plan(recipe, tokenizer, train, calibration, evaluation, model, method, arguments, engine, streamer)


def _engine(recipe: Recipe, arguments: TrainingArguments, method: Method, *, weights: int, device: Any) -> Engine:
    section, processes = recipe.engine, max(1, int(arguments.world_size))
    if device.type == "cpu":
        room = available_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        room = available_memory(str(arguments.device))
    strategy = resolve_strategy(section, processes, weights=weights, room=room)
    engine = choose_engine(strategy, section, processes, method)
    if section.offload.weights == "cpu" and (
        not engine.together or (device.type == "cpu" and engine.name != "deepspeed")
    ):
        raise CapabilityError(
            "shards wait in the CPU's memory for an accelerator that computes with them",
            where="engine.offload.weights",
            got=f"cpu, {engine.name} on {device.type}",
            fix="engine.strategy: fsdp on accelerators, or engine.offload.weights: disk in one process",
        )
    return engine


def _prepare(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, config: Any, limit: int | None, method: Method
) -> tuple[PreparedData, PreparedData, PreparedData | None]:
    """Returns the training, calibration and evaluation examples."""
    data = recipe.data
    if data.packing and (method.routes or method.needs_options):
        apart = "rows apart by their task" if method.routes else "the options of a question apart"
        raise CapabilityError(
            f"the method tells {apart}, and packing puts several examples into a row",
            where="data.packing",
            fix="data.packing: false",
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and data.max_length > longest:
        warnings.warn(
            f"data.max_length {data.max_length} is more than the model's {longest} positions, so {longest} is used",
            FinetuneWarning,
            stacklevel=2,
        )
    options: dict[str, Any] = {
        "format": data.format,
        "columns": data.columns,
        "system": data.system,
        "loss_on": data.loss_on,
        "max_length": min(data.max_length, longest or data.max_length),
        "truncation": data.truncation,
        "on_error": data.on_error,
        "max_dropped": data.max_dropped,
        "seed": recipe.seed,
        "vocabulary_size": config.vocab_size,
        "cache": data.cache,
        "tasks": method.routes,
        "template": data.template,
        "choices": method.needs_options,
    }
    if method.routes:
        limit = None  # the first rows do not show which tasks there are
    train = prepare_dataset(data.train, tokenizer, packing=data.packing, limit=limit, **options)
    evaluation = None
    if isinstance(data.eval, int | float):
        train, evaluation = split_eval(train, data.eval, seed=recipe.seed)
    elif data.eval is not None:
        evaluation = prepare_dataset(data.eval, tokenizer, packing=False, limit=limit, **options)
    if data.calibration is None:
        return train, train, evaluation
    return train, prepare_dataset(data.calibration, tokenizer, packing=data.packing, limit=limit, **options), evaluation


def _training_arguments(recipe: Recipe, method: Method) -> TrainingArguments:
    # Where the same parameters train at every step, looking for unused ones would walk the graph for nothing.
    given = {**_DEFAULTS, "ddp_find_unused_parameters": method.takes_turns, **recipe.train}
    if recipe.data.eval is not None:
        given.setdefault("eval_strategy", "epoch")
    on_cpu = resolve_device(recipe.model.device).type == "cpu"
    given.setdefault("dataloader_pin_memory", not on_cpu)
    try:
        return TrainingArguments(
            **given,
            output_dir=recipe.output_dir,
            seed=recipe.seed,
            report_to=[recipe.report_to] if isinstance(recipe.report_to, str) else list(recipe.report_to),
            use_cpu=on_cpu,
            # With the filter a NaN step is logged as loss 0.0 and the run goes on.
            logging_nan_inf_filter=False,
            remove_unused_columns=False,
            prediction_loss_only=True,
            disable_tqdm=True,
        )
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise ConfigError(
            "transformers refuses the training arguments", where="train", got=" ".join(str(error).split())
        ) from error


def _check_quantised(config: Any, method: Method) -> None:
    """P4: weights that are trained in place are no quantised ones."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None and method.writes_base:
        kind = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise CapabilityError(
            f"{method.name} changes the base's weights, and these are quantised",
            where="model.name_or_path",
            got=f"{getattr(config, '_name_or_path', '')} ({kind})",
            want="float32, bfloat16 or float16 weights",
            fix="method.name: lora, or s2ft with method.form: delta",
        )


def _asked(recipe: Recipe, calibration: PreparedData, evaluation: PreparedData | None) -> dict[str, str]:
    """Returns the tasks that the model will be looked at and measured on, and where each comes from."""
    from finetune.evaluation.tasks import read_task

    looked_at = {} if recipe.data.calibration is None else dict.fromkeys(calibration.tasks, "data.calibration")
    held_out = {} if evaluation is None else dict.fromkeys(evaluation.tasks, "data.eval")
    return {**looked_at, **held_out, **{read_task(task).trained_as: "eval.tasks" for task in recipe.eval.tasks}}


def _check_targets(recipe: Recipe, source: dict[str, Any], tasks: Sequence[str]) -> int:
    """P4: finds out without weights whether the model has what the method is to train; returns the model's size."""
    blank = load_model(recipe.model.name_or_path, meta=True, tied=recipe.model.tied, **source)
    size = count_parameters(blank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again, with the weights
        try:
            method = build_method(recipe.method)
            method.name_tasks(tasks)
            method.attach(blank)
        except FinetuneError:
            raise
        except Exception:  # what needs weights to be attached fails here, and says with weights what is wrong
            logging.getLogger(__name__).debug("%s was not attached without weights", recipe.method, exc_info=True)
    return size


def _check_batches(train: PreparedData, arguments: TrainingArguments) -> None:
    """P12: at least one batch."""
    rows = arguments.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.dataloader_drop_last and len(train.dataset) < rows:
        raise DataError(
            "there are fewer examples than one batch, and incomplete batches are dropped",
            where="train.dataloader_drop_last",
            got=f"{len(train.dataset)} examples, batch of {rows}",
            fix="train.dataloader_drop_last: false, or a smaller train.per_device_train_batch_size",
        )


def _check_recomputation(method: Method, arguments: TrainingArguments) -> None:
    """P3: methods that cannot have their activations computed again."""
    if arguments.activation_checkpointing and not method.recomputes:
        raise CapabilityError(
            f"{method.name} does not work with activation checkpointing",
            where="train.activation_checkpointing",
            fix="train.activation_checkpointing: false, or another method",
        )


def _check_precision(model: PreTrainedModel, arguments: TrainingArguments) -> None:
    """P14: no float16 weights under a gradient scaler."""
    import torch

    if arguments.fp16 and model.dtype == torch.float16:
        raise ConfigError(
            "train.fp16 scales the gradients of float32 weights, and the model is loaded in float16",
            where="model.dtype",
            got="float16",
            fix="model.dtype: float32 or bfloat16",
        )
