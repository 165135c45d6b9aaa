"""DeepSpeed's own configuration as a recipe gives it: for what the recipe does not say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.core.errors import ConfigError, Problem

__all__ = ["read_config"]

_IN_RECIPE = {
    "train_batch_size": "train.per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer": "train.optim",
    "scheduler": "train.lr_scheduler_type",
    "fp16": "model.dtype",
    "bf16": "model.dtype",
}
"""DeepSpeed's keys that would say again, or otherwise, what a recipe's key says."""


def read_config(given: dict[str, Any] | str | None) -> dict[str, Any]:
    """Returns the configuration in a dict or a JSON file, without what is left to the trainer (``auto``).

    Raises:
        ConfigError: The file is no JSON object, or it says what the recipe says elsewhere; all such keys are reported.
    """
    where = f"engine.deepspeed.config ({given})" if isinstance(given, str) else "engine.deepspeed.config"
    if isinstance(given, str):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("DeepSpeed's configuration cannot be read", where=where, got=str(error)) from error
        if not isinstance(given, dict):
            raise ConfigError("DeepSpeed's configuration is a JSON object", where=where, got=type(given).__name__)
    config = _without_auto(given or {})
    stage = config.get("zero_optimization", {}).pop("stage", None)
    problems = [
        Problem(f"{key} is for the recipe to say", where=where, fix=f"{ours} in the recipe, and no {key} here")
        for key, ours in _IN_RECIPE.items()
        if key in config
    ]
    if stage is not None:
        fix = f"engine.deepspeed.stage: {stage}, and no stage here"
        problems.append(Problem("zero_optimization.stage is for the recipe to say", where=where, fix=fix))
    if problems:
        raise ConfigError.of(problems)
    return config


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    nested = {key: _without_auto(value) if isinstance(value, dict) else value for key, value in config.items()}
    return {key: value for key, value in nested.items() if value not in ("auto", {"enabled": False})}
