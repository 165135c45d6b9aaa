"""A run's curves as files, and the smoothing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from finetune.report.metrics import CURVES, read_events, read_series, smooth
from finetune.report.plots import draw_svg, write_plots


def write_metrics(run: Path, events: list[dict[str, Any]]) -> None:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")


def test_smoothing_has_no_bias_at_the_start() -> None:
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    # s_2 = 0.9 x 0.1 x 1 + 0.1 x 3 = 0.39; divided by 1 - 0.81
    assert smooth([1.0, 3.0])[1] == pytest.approx(0.39 / 0.19)


def test_plots_and_their_data(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"step": step, "loss": 1 / step, "lr": 1e-3, "tokens": 100 * step, "grad_norm": None} for step in range(1, 6)
    ]
    write_metrics(tmp_path, [*events, {"step": 5, "eval_loss": 0.5}])
    written = write_plots(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in written] == [
        "plots/loss.png",
        "plots/loss.csv",
        "plots/lr.png",
        "plots/lr.csv",
    ]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    with written[1].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["loss"] for row in rows] == ["1.0", "0.5", str(1 / 3), "0.25", "0.2"]
    assert rows[4]["eval_loss"] == "0.5"
    assert rows[4]["tokens"] == "500"
    assert not list((tmp_path / "plots").glob(".*"))


def test_no_metrics_no_plots(tmp_path: Path) -> None:
    assert write_plots(tmp_path) == []
    assert not (tmp_path / "plots").exists()


def test_values_that_cannot_be_drawn_are_left_out(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": 1.0}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"loss": 2}\n{"step": 3, "lo')
    series = read_series(read_events(tmp_path), CURVES[0])
    assert (series.steps, series.values) == ((2,), (1.0,))


@pytest.mark.parametrize("steps", [[1], [3, 3], [1, 2]])
def test_short_runs_can_be_drawn(tmp_path: Path, steps: list[int]) -> None:
    write_metrics(tmp_path, [{"step": step, "loss": 1.0, "tokens": 10 * step} for step in steps])
    svg = draw_svg(read_series(read_events(tmp_path), CURVES[0]))
    assert svg.startswith("<svg")
    assert svg.endswith("</svg>")


def test_drawing_is_reproducible(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"step": step, "loss": 1.0 / step, "tokens": 10 * step} for step in (1, 2, 3)])
    series = read_series(read_events(tmp_path), CURVES[0])
    assert draw_svg(series) == draw_svg(series)
