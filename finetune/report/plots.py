"""A run's curves: PNG and CSV files in ``plots/``, and the same drawings as SVG for the page."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.files import replaced_file
from finetune.report.metrics import CURVES, SMOOTHING, Series, read_events, read_series, smooth, write_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["INK", "LINE", "STYLE", "draw_svg", "write_plots"]

LINE = "#2f6fdb"
_POINTS = "#d9661f"
INK = "#5b6470"
_SIZE = (6.4, 3.2)  # inches
# Texts of an SVG stay texts, so that the page's own font and colour apply; identifiers are the same in every run.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "text.parse_math": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def write_plots(run: Path) -> list[Path]:
    """Draws the curves of a run from its ``metrics.jsonl``.

    Args:
        run: The run directory.

    Returns:
        The files written to ``plots/``: one PNG and one CSV per curve that has values.
    """
    import matplotlib as mpl

    events, written = read_events(run), []
    for curve in CURVES:
        series = read_series(events, curve)
        if not series:
            continue
        picture, table = run / "plots" / f"{curve.name}.png", run / "plots" / f"{curve.name}.csv"
        write_csv(table, series)
        with mpl.rc_context(STYLE):
            figure = _draw(series, title=f"{_run_name(run)} · {curve.title.lower()}")
            with replaced_file(picture) as beside:
                figure.savefig(beside, format="png", dpi=150)
        written += [picture, table]
    return written


def draw_svg(series: Series) -> str:
    """Returns a curve as an SVG element for a page: transparent, in the page's text and ``--accent`` colours."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": series.curve.name}):
        figure = _draw(series, title="")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    svg = text[text.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?|version)="[^"]*"', "", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg, count=1)
    # Identifiers such as "axes_1" would be there once per picture.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    return svg.replace(INK, "currentColor").replace(LINE, "var(--accent)").strip()


def _draw(series: Series, *, title: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    curve = series.curve
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    _draw_lines(axes, series)
    axes.set_xlabel("step")
    axes.set_ylabel(curve.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, axis="y", color=INK, alpha=0.15, linewidth=0.6)
    axes.margins(x=0.01)
    if curve.name in ("memory", "tokens_per_s"):
        axes.set_ylim(bottom=0)
    if title:
        axes.set_title(title, loc="left", fontsize=10)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False, fontsize=8)
    if curve.smoothed and curve.points:
        _add_token_axis(axes, series)
    return figure


def _draw_lines(axes: Axes, series: Series) -> None:
    curve = series.curve
    marker = "o" if len(series.values) == 1 else ""
    if curve.smoothed and series.values:
        axes.plot(series.steps, series.values, color=LINE, alpha=0.4, linewidth=1, marker=marker, label="as logged")
        label = f"smoothed (moving average, β = {SMOOTHING:g})"
        axes.plot(series.steps, smooth(series.values), color=LINE, linewidth=1.8, label=label)
    elif series.values:
        axes.plot(series.steps, series.values, color=LINE, linewidth=1.8, marker=marker, label=curve.title.lower())
    if series.point_values:
        axes.plot(
            series.point_steps,
            series.point_values,
            color=_POINTS,
            marker="o",
            linestyle="none",
            markersize=5,
            label="held-out data",
        )


def _add_token_axis(axes: Axes, series: Series) -> None:
    """Adds an upper axis in tokens: as exact as the log, straight between its events."""
    if len(series.tokens) < 2 or len(set(series.steps)) < 2 or len(set(series.tokens)) < 2:
        return
    import numpy as np
    from matplotlib.ticker import EngFormatter

    steps, tokens = np.asarray(series.steps, float), np.asarray(series.tokens, float)
    # Interpolation would be flat outside the data, which an axis cannot invert; the mean rate goes on there.
    rate = (tokens[-1] - tokens[0]) / (steps[-1] - steps[0])
    reach = max(1.0, steps[-1] - steps[0])
    steps = np.concatenate([[steps[0] - reach], steps, [steps[-1] + reach]])
    tokens = np.concatenate([[tokens[0] - reach * rate], tokens, [tokens[-1] + reach * rate]])

    def to_tokens(step: Any) -> Any:
        return np.interp(step, steps, tokens)

    def to_steps(seen: Any) -> Any:
        return np.interp(seen, tokens, steps)

    upper = axes.secondary_xaxis("top", functions=(to_tokens, to_steps))
    upper.xaxis.set_major_formatter(EngFormatter(sep=" "))
    upper.set_xlabel("tokens")


def _run_name(run: Path) -> str:
    return run.absolute().name
