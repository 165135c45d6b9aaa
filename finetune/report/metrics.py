"""``metrics.jsonl`` as series of numbers."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.core.files import replaced_file

__all__ = ["CURVES", "Curve", "Series", "read_events", "read_series", "smooth", "write_csv"]

METRICS = "metrics.jsonl"
SMOOTHING = 0.9


@dataclass(frozen=True)
class Curve:
    """What one plot shows.

    Attributes:
        name: File name without suffix.
        field: Key in ``metrics.jsonl``.
        title: Above the plot.
        unit: Beside the y axis.
        smoothed: Whether a smoothed line is drawn over the raw one.
        points: Key of the evaluation's values, drawn as markers, or an empty string.
    """

    name: str
    field: str
    title: str
    unit: str
    smoothed: bool = False
    points: str = ""


CURVES = (
    Curve("loss", "loss", "Loss", "nats per token", smoothed=True, points="eval_loss"),
    Curve("lr", "lr", "Learning rate", ""),
    Curve("grad_norm", "grad_norm", "Gradient norm", "", smoothed=True),
    Curve("tokens_per_s", "tokens_per_s", "Speed", "tokens per second"),
    Curve("memory", "mem_peak_gb", "Peak memory", "GB"),
)


@dataclass(frozen=True)
class Series:
    """The values of one curve.

    Attributes:
        curve: What it is.
        steps: Optimizer steps of the values.
        values: Finite values.
        tokens: Tokens seen at each step; empty where they were not logged.
        point_steps: Steps of the evaluation's values.
        point_values: The evaluation's values.
    """

    curve: Curve
    steps: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    tokens: tuple[float, ...] = ()
    point_steps: tuple[float, ...] = ()
    point_values: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.values or self.point_values)


def read_events(run: Path) -> list[dict[str, Any]]:
    """Returns the events of ``metrics.jsonl``; none where there is no file.

    A line that is no JSON object is left out: a run that was killed may have written half of its last one.
    """
    file = run / METRICS
    if not file.is_file():
        return []
    events = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "step" in event:
            events.append(event)
    return events


def read_series(events: Iterable[dict[str, Any]], curve: Curve) -> Series:
    """Returns the finite values of ``curve``."""
    events = list(events)
    line = [event for event in events if _is_number(event.get(curve.field))]
    points = [event for event in events if curve.points and _is_number(event.get(curve.points))]
    tokens = [event.get("tokens") for event in line]
    return Series(
        curve,
        steps=tuple(event["step"] for event in line),
        values=tuple(float(event[curve.field]) for event in line),
        tokens=tuple(tokens) if all(_is_number(count) for count in tokens) else (),  # type: ignore[arg-type]
        point_steps=tuple(event["step"] for event in points),
        point_values=tuple(float(event[curve.points]) for event in points),
    )


def smooth(values: Sequence[float], beta: float = SMOOTHING) -> list[float]:
    """Returns the exponential moving average with bias correction: ``s_t / (1 - beta^t)``."""
    state, smoothed = 0.0, []
    for count, value in enumerate(values, 1):
        state = beta * state + (1 - beta) * value
        smoothed.append(state / (1 - beta**count))
    return smoothed


def write_csv(path: Path, series: Series) -> None:
    """Writes the data of a plot: step, tokens, value, smoothed value, and the evaluation's value."""
    curve = series.curve
    smoothed = smooth(series.values) if curve.smoothed else []
    rows: dict[float, dict[str, float]] = {}
    for position, (step, value) in enumerate(zip(series.steps, series.values, strict=True)):
        row = rows.setdefault(step, {"step": step})
        row[curve.field] = value
        if series.tokens:
            row["tokens"] = series.tokens[position]
        if smoothed:
            row["smoothed"] = smoothed[position]
    for step, value in zip(series.point_steps, series.point_values, strict=True):
        rows.setdefault(step, {"step": step})[curve.points] = value
    fields = ["step", *(["tokens"] if series.tokens else []), curve.field]
    fields += ["smoothed"] * bool(smoothed) + [curve.points] * bool(series.point_steps)
    with replaced_file(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows[step] for step in sorted(rows))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
