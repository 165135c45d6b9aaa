"""The picture of a selection: how scores and lengths of the rows that are kept lie among those of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.core.files import replaced_file
from finetune.report.plots import INK, LINE, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Histogram", "write_distribution"]

_BINS = 60
_SIZE = (9.6, 3.2)  # inches


@dataclass(frozen=True)
class Histogram:
    """One quantity of all rows, and of those that are kept.

    Attributes:
        label: What it is, with its unit.
        pool: Values of all rows.
        kept: Values of the rows that are kept.
    """

    label: str
    pool: Sequence[float]
    kept: Sequence[float]


def write_distribution(path: Path, histograms: Sequence[Histogram], *, title: str) -> None:
    """Draws histograms side by side into a PNG file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        for axes, histogram in zip(figure.subplots(1, len(histograms)), histograms, strict=True):
            _draw(axes, histogram)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        with replaced_file(path) as beside:
            figure.savefig(beside, format="png", dpi=150)


def _draw(axes: Axes, histogram: Histogram) -> None:
    import numpy as np

    edges = np.histogram_bin_edges(histogram.pool, bins=_BINS).tolist()
    axes.hist(histogram.pool, bins=edges, color=INK, alpha=0.35, label=f"all {len(histogram.pool):,}")
    axes.hist(histogram.kept, bins=edges, color=LINE, alpha=0.85, label=f"kept {len(histogram.kept):,}")
    axes.set_xlabel(histogram.label)
    axes.set_ylabel("rows")
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=8)
