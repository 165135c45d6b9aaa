"""The picture of several trained models side by side: one panel per metric, a point and its interval per model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.core.files import replaced_file
from finetune.report.plots import INK, LINE, STYLE

__all__ = ["write_comparison"]

_WIDTH, _ROW = 4.2, 0.34  # inches


def write_comparison(path: Path, results: Mapping[str, Sequence[Mapping[str, Any]]], *, title: str) -> None:
    """Draws a PNG file.

    Args:
        path: Where to.
        results: What each model is called -> its results: ``task``, ``metric``, ``value``, ``low``, ``high``.
        title: What stands above.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((one["task"], one["metric"]) for found in results.values() for one in found))
    names = list(results)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH * len(panels), 1.1 + _ROW * len(names)), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for place, name in enumerate(names):
                for one in results[name]:
                    if (one["task"], one["metric"]) == panel:
                        axes.plot([one["low"], one["high"]], [place, place], color=INK, alpha=0.5, linewidth=2)
                        axes.plot(one["value"], place, color=LINE, marker="o")
            axes.set_yticks(range(len(names)), names)
            axes.invert_yaxis()
            axes.set_xlabel(f"{panel[1].replace('_', ' ')} on {panel[0]}")
            axes.grid(visible=True, axis="x", color=INK, alpha=0.15, linewidth=0.6)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        with replaced_file(path) as beside:
            figure.savefig(beside, format="png", dpi=150)
