"""The report of a reflection: which rows it shows, and which pictures."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.data.records import Message
from finetune.data_selection.reflection.choice import VersionScores
from finetune.report.distribution import Histogram, write_distribution
from finetune.report.reflection import Rewrite, ShownVersion, write_reflection_page
from finetune.selection.describe import next_command
from finetune.selection.folder import SelectionFolder
from finetune.selection.page import SHOWN, shortened
from finetune.selection.reflected import ReflectedRow

__all__ = ["write_page"]


def write_page(rows: Sequence[ReflectedRow], folder: SelectionFolder, manifest: Mapping[str, Any]) -> None:
    """Draws the distributions and writes ``report.html``."""
    picture = folder.plots / "distribution.png"
    histograms = [_histogram(rows, name, label) for name, label in (("ifd", "IFD"), ("r_ifd", "r-IFD"))]
    title = f"{folder.path.absolute().name} · originals, and versions that the teacher wrote"
    write_distribution(picture, histograms, title=title)
    again = f"finetune reflect {shlex.quote(str(folder.recipe))} reflect.keep=all --resume"
    write_reflection_page(
        folder.report,
        manifest,
        rewrites=[_rewrite(row) for row in rows if not row.left_out and row.origin != "original"][:SHOWN],
        pictures=[picture],
        config=folder.recipe.read_text(encoding="utf-8"),
        commands=[
            (next_command(folder, manifest), "train on the versions that are kept"),
            (again, "keep rows whose answer the teacher did not make better, too"),
        ],
    )


def _histogram(rows: Sequence[ReflectedRow], name: str, label: str) -> Histogram:
    values = [(origin == "original", getattr(scores, name)) for row in rows for origin, scores in row.scores.items()]
    originals = [value for original, value in values if original]
    rewritten = [value for original, value in values if not original]
    return Histogram(label, originals, rewritten, names=("originals", "rewritten"))


def _rewrite(row: ReflectedRow) -> Rewrite:
    assert row.origin is not None  # only rows that are kept are shown
    before = _shown(row.original.messages, row.scores["original"])
    return Rewrite(row.original.where, row.origin, before, _shown(row.messages, row.scores[row.origin]))


def _shown(messages: Sequence[Message], scores: VersionScores) -> ShownVersion:
    *asked, answer = (message.content for message in messages)
    return ShownVersion(shortened("\n".join(asked)), shortened(answer), f"{scores.ifd:.3g}", f"{scores.r_ifd:.3g}")
