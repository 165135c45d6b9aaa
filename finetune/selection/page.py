"""The report of a selection: which rows it shows, and which pictures."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from finetune.report.distribution import Histogram, write_distribution
from finetune.report.selection import ShownRow, write_selection_page
from finetune.selection.describe import next_command
from finetune.selection.folder import SelectionFolder
from finetune.selection.result import Selection

__all__ = ["SHOWN", "shortened", "write_page"]

SHOWN = 10
"""Rows that a page shows of a kind."""
_LONGEST_TEXT = 600


def write_page(selection: Selection, folder: SelectionFolder, manifest: Mapping[str, Any]) -> None:
    """Draws the distributions and writes ``report.html``."""
    scorer, chosen = selection.plan.scorer.name, selection.chosen
    lengths = {position: float(selection.examples[position].answer_tokens) for position in selection.scores}
    picture = folder.plots / "distribution.png"
    histograms = [
        Histogram(scorer, selection.values(), selection.values(chosen)),
        Histogram("answer length (tokens)", list(lengths.values()), [lengths[position] for position in chosen]),
    ]
    write_distribution(picture, histograms, title=f"{folder.path.absolute().name} · scores and lengths")
    ranked = sorted(selection.scores, key=lambda position: (selection.scores[position].value, position))
    write_selection_page(
        folder.report,
        manifest,
        highest=[_shown(selection, position) for position in ranked[: -SHOWN - 1 : -1]],
        lowest=[_shown(selection, position) for position in ranked[:SHOWN]],
        pictures=[picture],
        config=folder.recipe.read_text(encoding="utf-8"),
        commands=[
            (next_command(folder, manifest), "train on the rows that are kept"),
            (f"finetune select {shlex.quote(str(folder.recipe))} select.fraction=0.1 --resume", "keep others"),
        ],
    )


def _shown(selection: Selection, position: int) -> ShownRow:
    row = selection.examples[position].conversation
    before, answer = row.messages[:-1], row.messages[-1].content if row.messages else row.text
    return ShownRow(
        score=f"{selection.scores[position].value:.4g}",
        where=row.where,
        prompt=shortened("\n".join(message.content for message in before)),
        answer=shortened(answer),
        kept=position not in selection.left_out,
        reason=selection.left_out.get(position, ""),
    )


def shortened(text: str) -> str:
    """Returns the beginning of a long text."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} …"
