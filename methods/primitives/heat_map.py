"""A picture of a scan: layers by module types, the chosen ones framed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.core.files import replaced_file
from finetune.methods.primitives.module_types import by_type

__all__ = ["write_heat_map"]


def write_heat_map(path: Path, scores: Mapping[str, float], chosen: Mapping[str, Sequence[str]], *, title: str) -> None:
    """Writes a PNG: one row per type, one column per layer, darker where a module ranks higher within its type.

    Scores of different types are not comparable, so the colour is the rank; the number is the score.
    """
    from matplotlib.figure import Figure

    types = by_type(scores)
    columns = max(len(names) for names in types.values())
    figure = Figure(figsize=(max(6.0, 0.42 * columns + 2.4), 0.5 * len(types) + 1.4), layout="constrained")
    axes = figure.subplots()
    ranks = [[math.nan] * columns for _ in types]
    for row, (kind, names) in enumerate(types.items()):
        order = sorted(names, key=lambda name: scores[name])
        for column, name in enumerate(names):
            ranks[row][column] = (order.index(name) + 1) / len(names)
            strong = ranks[row][column] > 0.6
            value = scores[name]
            label = "inf" if math.isinf(value) else f"{value:.2g}"
            axes.text(column, row, label, ha="center", va="center", fontsize=5, color="white" if strong else "black")
            if name in chosen[kind]:
                axes.add_patch(_frame(column, row))
    axes.imshow(ranks, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_yticks(range(len(types)), list(types))
    axes.set_xlabel("layer")
    axes.set_title(title, fontsize=9)
    with replaced_file(path) as beside:
        figure.savefig(beside, format="png", dpi=150)


def _frame(column: int, row: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="#d9661f", linewidth=1.4)
