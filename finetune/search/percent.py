"""One number in percent for the results of several tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from finetune.core.errors import ConfigError
from finetune.report.figures import is_cost

__all__ = ["percent"]


def percent(results: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> float:
    """Returns the mean over tasks, in [0, 100], higher is better.

    Shares count as they are, several metrics of one task as their mean. A task that measures only losses or
    perplexities counts as a mean probability: ``exp(-loss)``, ``1 / perplexity``, ``2 ** -bits``.

    Args:
        results: ``task``, ``metric`` and ``value`` of each result.
        tasks: Names of the tasks that count.

    Raises:
        ConfigError: A task has no result.
    """
    return fmean(100 * _of_task(task, results) for task in tasks)


def _of_task(task: str, results: Sequence[Mapping[str, Any]]) -> float:
    own = [result for result in results if result["task"] == task]
    if not own:
        found = ", ".join(dict.fromkeys(result["task"] for result in results))
        raise ConfigError("a task has no result to search by", where="search", got=task, want=found)
    shares = [result["value"] for result in own if not is_cost(result["metric"])]
    return fmean(shares) if shares else _probability(own[0]["metric"], own[0]["value"])


def _probability(metric: str, value: float) -> float:
    if metric.endswith("perplexity"):
        return 1 / value
    return 2**-value if metric.endswith("bits_per_byte") else math.exp(-value)
