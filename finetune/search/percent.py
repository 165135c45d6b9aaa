"""One number in percent for the results of several tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

__all__ = ["percent"]


def percent(results: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> float:
    """Returns the mean over tasks, in [0, 100], higher is better.

    Shares count as they are, several metrics of one task as their mean; a task that measures loss counts as the mean
    probability of its tokens, ``exp(-loss)``.

    Args:
        results: ``task``, ``metric`` and ``value`` of each result.
        tasks: Names of the tasks that count.
    """
    return fmean(100 * _of_task([result for result in results if result["task"] == task]) for task in tasks)


def _of_task(results: Sequence[Mapping[str, Any]]) -> float:
    losses = [result["value"] for result in results if result["metric"] == "loss"]
    if losses:
        return math.exp(-losses[0])
    return fmean(1 / r["value"] if r["metric"].endswith("perplexity") else r["value"] for r in results)
