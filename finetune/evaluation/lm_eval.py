"""Tasks of EleutherAI's lm-evaluation-harness, through the ``eval`` extra."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

from finetune.evaluation.results import TaskResult

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

__all__ = ["results_of", "run_lm_eval"]

_Z = 1.959963984540054


def run_lm_eval(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str, *, limit: int | None, batch_size: int
) -> list[TaskResult]:
    """Returns each metric of lm-eval's task (or group of tasks) ``name``.

    Args:
        model: A causal LM, plain or wrapped by PEFT.
        tokenizer: Its tokenizer.
        name: What lm-eval calls the task.
        limit: Scores only the first rows of each task, which lm-eval advises for trials only.
        batch_size: Rows of one forward pass.
    """
    lm_eval: Any = importlib.import_module("lm_eval")
    models: Any = importlib.import_module("lm_eval.models.huggingface")
    wrapped = models.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    found = lm_eval.simple_evaluate(model=wrapped, tasks=[name], limit=limit, batch_size=batch_size)
    return results_of(found)


def results_of(found: dict[str, Any]) -> list[TaskResult]:
    """Returns the metrics that ``lm_eval.simple_evaluate`` found, with intervals from its standard errors."""
    results = []
    for task, metrics in found["results"].items():
        count = int(found["n-samples"].get(task, {}).get("effective", 0))
        for key, value in metrics.items():
            metric, _, variant = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, (int, float)) or isinstance(value, bool):
                continue
            error = metrics.get(f"{metric}_stderr,{variant}")
            half = _Z * error if isinstance(error, (int, float)) else math.inf
            label = metric if variant in ("", "none") else f"{metric} ({variant})"
            results.append(TaskResult(f"lm-eval:{task}", label, float(value), count, value - half, value + half))
    return results
