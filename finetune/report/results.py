"""Evaluations and answers before and after, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.report.figures import is_cost, metric_in_words

__all__ = ["Measured", "ResultRow", "Sample", "compare_results", "compare_samples"]


@dataclass(frozen=True)
class Measured:
    """One value of one model.

    Attributes:
        value: The metric.
        low: Lower end of the 95 % interval, or None.
        high: Upper end, or None.
        text: The value in words.
        interval: The interval in words, or an empty string.
    """

    value: float
    low: float | None
    high: float | None
    text: str
    interval: str


@dataclass(frozen=True)
class ResultRow:
    """One line of the table of results.

    Attributes:
        task: Task.
        metric: Metric.
        group: Value of the rows' ``group``, or an empty string for all rows.
        n: Rows that were scored.
        before: The base model, or None where it was not evaluated.
        after: The tuned model, or None.
        change: The difference in words, or an empty string.
        better: Whether the tuned model is better; None where there is nothing to compare or no difference.
        share: Whether values are shares, which can be drawn on a scale from 0 to 1.
    """

    task: str
    metric: str
    group: str
    n: int
    before: Measured | None
    after: Measured | None
    change: str
    better: bool | None
    share: bool


@dataclass(frozen=True)
class Sample:
    """One prompt and what was answered; an answer that is not known is None."""

    prompt: str
    expected: str
    before: str | None
    after: str | None
    before_correct: bool | None
    after_correct: bool | None


def compare_results(evaluation: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[ResultRow]:
    """Returns one row for each task and metric, each followed by those of its groups.

    Args:
        evaluation: ``before`` and ``after`` -> results as :meth:`finetune.evaluation.results.TaskResult.as_dict` gives.
    """
    moments = [_by_name(evaluation.get(moment) or ()) for moment in ("before", "after")]
    rows = []
    for name in dict.fromkeys([*moments[1], *moments[0]]):
        earlier, later = moments[0].get(name), moments[1].get(name)
        rows.append(_row(*name, "", earlier, later))
        groups = [result.get("groups") or {} if result else {} for result in (earlier, later)]
        for group in dict.fromkeys([*groups[1], *groups[0]]):
            pair = [_of_group(found.get(group)) for found in groups]
            rows.append(_row(*name, str(group), *pair))
    return rows


def compare_samples(record: Mapping[str, Any], limit: int = 8) -> list[Sample]:
    """Returns answers of both models to the same prompts, those of the first task that has any.

    Args:
        record: The content of ``run.json``: its ``samples``, or else the samples of its ``evaluation``.
        limit: Most samples to return.
    """
    if record.get("samples"):
        return [_sample(row) for row in record["samples"][:limit]]
    evaluation = record.get("evaluation") or {}
    sampled = [result for result in evaluation.get("after") or () if result.get("samples")]
    if not sampled:
        return []
    task = sampled[0]["task"]
    earlier = {
        row["id"]: row
        for result in evaluation.get("before") or ()
        if result["task"] == task
        for row in result.get("samples") or ()
    }
    rows = []
    for row in sampled[0]["samples"][:limit]:
        base = earlier.get(row["id"])
        before = {"before": base["output"], "before_correct": base["correct"]} if base else {}
        rows.append(_sample({**row, "after": row["output"], "after_correct": row["correct"], **before}))
    return rows


def _by_name(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(str(result["task"]), str(result["metric"])): result for result in results}


def _of_group(found: Sequence[Any] | None) -> Mapping[str, Any] | None:
    return None if found is None else {"value": found[0], "n": found[1]}


def _row(
    task: str, metric: str, group: str, earlier: Mapping[str, Any] | None, later: Mapping[str, Any] | None
) -> ResultRow:
    before, after = _measured(metric, earlier), _measured(metric, later)
    change, better = "", None
    if before is not None and after is not None:
        difference = after.value - before.value
        text = f"{difference:+.3f}" if is_cost(metric) else f"{100 * difference:+.1f} points"
        change = text.replace("-", "−")
        better = None if difference == 0 else (difference < 0) == is_cost(metric)
    count = next((int(result["n"]) for result in (later, earlier) if result and result.get("n") is not None), 0)
    values = [measured.value for measured in (before, after) if measured is not None]
    share = not is_cost(metric) and all(0 <= value <= 1 for value in values)
    return ResultRow(task, metric, group, count, before, after, change, better, share)


def _measured(metric: str, result: Mapping[str, Any] | None) -> Measured | None:
    if result is None or result.get("value") is None:
        return None
    low, high = result.get("low"), result.get("high")
    known = low is not None and high is not None
    interval = f"{metric_in_words(metric, low)} to {metric_in_words(metric, high)}" if known else ""
    return Measured(float(result["value"]), low, high, metric_in_words(metric, result["value"]), interval)


def _sample(row: Mapping[str, Any]) -> Sample:
    expected = str(row.get("expected") or "")

    def correct(moment: str) -> bool | None:
        if row.get(f"{moment}_correct") is not None:
            return bool(row[f"{moment}_correct"])
        answer = row.get(moment)
        return None if answer is None or not expected else str(answer).strip() == expected.strip()

    return Sample(
        str(row.get("prompt") or ""), expected, row.get("before"), row.get("after"), correct("before"), correct("after")
    )
