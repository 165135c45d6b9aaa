"""What an evaluation found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Prediction", "TaskResult", "evenly_spaced"]


@dataclass(frozen=True)
class Prediction:
    """What the model answered to one row.

    Attributes:
        id: The row's id.
        prompt: The last message before the answer.
        expected: The right answer.
        output: The model's answer.
        correct: Whether they are the same.
        group: The row's group, or an empty string.
    """

    id: str
    prompt: str
    expected: str
    output: str
    correct: bool
    group: str = ""


@dataclass(frozen=True)
class TaskResult:
    """One metric of one task.

    Attributes:
        task: The task's name.
        metric: ``exact_match``, ``accuracy``, ``loss``, ``perplexity``, or what lm-eval calls it.
        value: The metric over all rows: a share in [0, 1], except for losses and perplexities.
        n: Rows that were scored.
        low: Lower end of the 95 % interval.
        high: Upper end of the 95 % interval.
        groups: For each value of the rows' ``group`` field: the metric over those rows, and how many they are.
        samples: Some predictions, evenly spaced over the rows.
        predictions: All predictions, in the order of the rows; empty for losses and lm-eval.
    """

    task: str
    metric: str
    value: float
    n: int
    low: float
    high: float
    groups: dict[str, tuple[float, int]] = field(default_factory=dict)
    samples: tuple[Prediction, ...] = ()
    predictions: tuple[Prediction, ...] = ()

    @property
    def is_share(self) -> bool:
        """Whether the value is a share, to be printed as a percentage."""
        return self.metric not in ("loss", "perplexity")

    def as_dict(self) -> dict[str, Any]:
        """Returns what goes into JSON: everything but the full predictions; an unknown bound is None."""
        return {
            "task": self.task,
            "metric": self.metric,
            "value": self.value,
            "n": self.n,
            "low": self.low if math.isfinite(self.low) else None,
            "high": self.high if math.isfinite(self.high) else None,
            "groups": {name: list(pair) for name, pair in self.groups.items()},
            "samples": [vars(sample) for sample in self.samples],
        }


def evenly_spaced(count: int, limit: int | None) -> list[int]:
    """Returns at most ``limit`` of the positions [0, ``count``), evenly spaced: a file may be sorted."""
    if limit is None or limit >= count:
        return list(range(count))
    return [position * count // limit for position in range(limit)]
