"""Keys of other tools and of earlier versions of transformers, each with what it is called here."""

from __future__ import annotations

from typing import Any

from finetune.config.yaml12 import flow_yaml
from finetune.core.errors import Problem

__all__ = ["ADVICE", "RENAMED", "answer_alias", "owned_elsewhere"]

RENAMED: dict[str, str] = {
    # TRL, Hugging Face
    "model_name_or_path": "model.name_or_path",
    "torch_dtype": "model.dtype",
    "model_revision": "model.revision",
    "tokenizer": "model.name_or_path",
    "dataset_name": "data.train",
    "train_file": "data.train",
    "validation_file": "data.eval",
    "max_seq_length": "data.max_length",
    "chat_template_path": "data.chat_template",
    "lora_r": "method.r",
    "lora_rank": "method.r",
    "lora_target_modules": "method.target_modules",
    "evaluation_strategy": "train.eval_strategy",
    "lr": "train.learning_rate",
    "train.batch_size": "train.per_device_train_batch_size",
    "warmup_ratio": "train.warmup_steps",
    "per_gpu_train_batch_size": "train.per_device_train_batch_size",
    # LLaMA-Factory
    "finetuning_type": "method.name",
    "lora_target": "method.target_modules",
    "dataset": "data.train",
    "eval_dataset": "data.eval",
    "val_size": "data.eval",
    "template": "data.chat_template",
    "cutoff_len": "data.max_length",
    "flash_attn": "model.attn_implementation",
    # axolotl
    "base_model": "model.name_or_path",
    "adapter": "method.name",
    "datasets": "data.train",
    "test_datasets": "data.eval",
    "val_set_size": "data.eval",
    "sequence_len": "data.max_length",
    "sample_packing": "data.packing",
    "micro_batch_size": "train.per_device_train_batch_size",
    "num_epochs": "train.num_train_epochs",
    "epochs": "train.num_train_epochs",
    "lr_scheduler": "train.lr_scheduler_type",
    "optimizer": "train.optim",
    "attn_impl": "model.attn_implementation",
    # litgpt, torchtune, ms-swift
    "checkpoint_dir": "model.name_or_path",
    "out_dir": "output_dir",
    "prompt_style": "data.chat_template",
    "max_seq_len": "data.max_length",
    "tuner_type": "method.name",
    "train_type": "method.name",
    "metric_logger": "report_to",
    # TrainingArguments that another section owns
    "train.output_dir": "output_dir",
    "train.seed": "seed",
    "train.data_seed": "seed",
    "train.report_to": "report_to",
}
"""Foreign key -> ours; the value keeps its meaning. A key with a section before it is meant in that section only."""

_WHOLE_SEQUENCES = (
    "a sequence is not split over processes: train.activation_checkpointing: true, or a smaller data.max_length"
)

ADVICE: dict[str, str] = {
    "train_on_inputs": "data.loss_on: all   (or assistant)",
    "train_on_input": "data.loss_on: all   (or assistant)",
    "train_on_prompt": "data.loss_on: all   (or assistant)",
    "mask_prompt": "data.loss_on: assistant   (or all)",
    "mask_history": "data.loss_on: last   (or assistant)",
    "roles_to_train": "data.loss_on: assistant   (or all)",
    "loss_scale": "data.loss_on: assistant   (or all)",
    "completion_only_loss": "data.loss_on: completion   (or all)",
    "assistant_only_loss": "data.loss_on: assistant   (or all)",
    "use_peft": "method.name: lora",
    "lora_target_linear": "method.target_modules: all-linear",
    "load_in_4bit": "remove it: quantised bases are not supported",
    "load_in_8bit": "remove it: quantised bases are not supported",
    "overwrite_output_dir": "finetune train RECIPE --overwrite",
    "resume_from_checkpoint": "finetune train RECIPE --resume",
    "train.resume_from_checkpoint": "finetune train RECIPE --resume",
    "logging_dir": "remove it: logs lie in output_dir",
    "save_safetensors": "remove it: everything is saved as safetensors",
    "group_by_length": "data.group_by_length: true",
    "train.train_sampling_strategy": "data.group_by_length: true",
    "train.length_column_name": "data.group_by_length: true",
    "no_cuda": "model.device: cpu",
    "use_cpu": "model.device: cpu",
    "train.use_cpu": "model.device: cpu",
    "global_batch_size": "train.per_device_train_batch_size and train.gradient_accumulation_steps, whose product it is",
    "wandb_project": "report_to: wandb",
    "deepspeed": "engine.strategy",
    "train.deepspeed": "engine.strategy",
    "fsdp": "engine.strategy",
    "train.fsdp": "engine.strategy",
    "train.fsdp_config": "engine.strategy",
    "train.parallelism_config": "engine.strategy: fsdp; a sequence is not split over processes",
    "context_parallel_size": _WHOLE_SEQUENCES,
    "sequence_parallel_size": _WHOLE_SEQUENCES,
    "cp_size": _WHOLE_SEQUENCES,
    "sp_size": _WHOLE_SEQUENCES,
    "train.local_rank": "finetune train RECIPE --nproc N",
    "train.do_train": "remove it: `finetune train` trains",
    "train.do_eval": "data.eval, with train.eval_strategy",
    "train.do_predict": "eval.tasks",
    "train.disable_tqdm": "finetune train RECIPE --quiet",
    "train.logging_nan_inf_filter": "remove it: a loss that is not a number always stops the run",
    "train.remove_unused_columns": "remove it: rows are prepared by the data section",
    "train.label_names": "data.loss_on: assistant",
    "train.prediction_loss_only": "remove it: evaluation keeps losses only",
    "train.include_for_metrics": "eval.tasks",
    "train.auto_find_batch_size": "train.per_device_train_batch_size: 1, then more",
}
"""Foreign key -> what to do instead, where the value does not keep its meaning."""


def answer_alias(key: str, value: Any, where: str) -> Problem | None:
    """Returns what to write for a foreign ``key``, or None where it is not known.

    Args:
        key: Dotted key as given.
        value: Its value.
        where: Where it was given.
    """
    for name in (key, key.rpartition(".")[2]):
        if ours := RENAMED.get(name):
            note = "   (below 1: a share of the steps)" if name == "warmup_ratio" else ""
            fix = f"{ours}: {flow_yaml(value)}{note}"
            return Problem(f"{name!r} is called {ours!r} here", where, near=ours, fix=fix)
        if advice := ADVICE.get(name):
            return Problem(f"{name!r} is not a key here", where, fix=advice)
    return None


def owned_elsewhere(section: str) -> frozenset[str]:
    """Returns the keys of ``section`` that this table answers: the section does not have them."""
    prefix = f"{section}."
    return frozenset(key.removeprefix(prefix) for key in (*RENAMED, *ADVICE) if key.startswith(prefix))
