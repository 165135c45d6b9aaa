"""The picture of a selection: how scores and lengths of some rows lie beside those of others."""

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
    """One quantity of two sets of rows.

    Attributes:
        label: What it is, with its unit.
        behind: Values of one set; of a selection all rows.
        before: Values of the other, drawn before them; of a selection the rows that are kept.
        names: What the two sets are called.
    """

    label: str
    behind: Sequence[float]
    before: Sequence[float]
    names: tuple[str, str] = ("all", "kept")


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

    edges = np.histogram_bin_edges([*histogram.behind, *histogram.before], bins=_BINS).tolist()
    sets = zip((histogram.behind, histogram.before), histogram.names, ((INK, 0.35), (LINE, 0.6)), strict=True)
    for values, name, (color, alpha) in sets:
        axes.hist(values, bins=edges, color=color, alpha=alpha, label=f"{name} {len(values):,}")
    axes.set_xlabel(histogram.label)
    axes.set_ylabel("rows")
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=8)
