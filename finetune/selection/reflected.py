"""What a reflection leaves: the version of each row that is kept, and a table of what all versions score."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from finetune.core.files import replaced_file, write_text
from finetune.data.records import Conversation, Message
from finetune.data_selection.base import Evidence, Unscored
from finetune.data_selection.reflection.choice import ORIGINS, Origin, VersionScores, excluded, preferred
from finetune.data_selection.reflection.teacher import versions
from finetune.selection.folder import SelectionFolder

__all__ = ["RESULT", "ReflectedRow", "reflected_row", "write_reflected"]

RESULT = "reflected.jsonl"


@dataclass(frozen=True)
class ReflectedRow:
    """What became of one row.

    Attributes:
        original: The row.
        scores: What the student says of each version.
        status: What became of each reflection, by the origin of the version that it was to give.
        origin: Which version is preferred; None where there is no choice.
        messages: That version.
        left_out: Why it is not kept, or an empty string.
        detail: What is special to this row.
    """

    original: Conversation
    scores: Mapping[Origin, VersionScores] = field(default_factory=dict)
    status: Mapping[Origin, str] = field(default_factory=dict)
    origin: Origin | None = None
    messages: tuple[Message, ...] = ()
    left_out: str = ""
    detail: str = ""


def reflected_row(
    original: Conversation,
    reflections: Sequence[Evidence] | Unscored,
    scores: Mapping[Origin, VersionScores],
    *,
    keep: Literal["improved", "all"],
) -> ReflectedRow:
    """Returns the version of a row that the student prefers, or why there is none.

    Args:
        original: The row.
        reflections: What the teacher wrote, or why it wrote nothing.
        scores: What the student says of each version that can be scored.
        keep: As of a recipe's ``reflect`` section.
    """
    if isinstance(reflections, Unscored):
        return ReflectedRow(original, left_out=reflections.reason, detail=reflections.detail)
    (found,) = reflections
    if "original" not in scores:
        return ReflectedRow(original, scores, found["status"], left_out="the original has no score")
    origin = preferred(scores)
    left_out = excluded(origin, scores[origin], keep=keep)
    return ReflectedRow(original, scores, found["status"], origin, versions(original, found)[origin], left_out)


def write_reflected(rows: Sequence[ReflectedRow], folder: SelectionFolder) -> list[Path]:
    """Writes the kept versions and the table, and returns both files."""
    import pyarrow
    import pyarrow.parquet

    kept = [json.dumps(_line(row), ensure_ascii=False) + "\n" for row in rows if not row.left_out]
    folder.selected.mkdir(parents=True, exist_ok=True)
    write_text(folder.selected / RESULT, "".join(kept))
    table = pyarrow.Table.from_pylist([_entry(row) for row in rows])
    with replaced_file(folder.scores) as beside:
        pyarrow.parquet.write_table(table, beside)
    return [folder.selected / RESULT, folder.scores]


def _line(row: ReflectedRow) -> dict[str, Any]:
    assert row.origin is not None  # a row without one is left out
    said = [{"role": message.role, "content": message.content} for message in row.messages]
    about = {"id": row.original.id, "source": row.original.source, "line": row.original.line}
    return {"messages": said, "origin": row.origin, **about, **vars(row.scores[row.origin])}


def _entry(row: ReflectedRow) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "row": row.original.number,
        "id": row.original.id,
        "source": row.original.source,
        "line": row.original.line,
        "origin": row.origin,
        "left_out": row.left_out,
        "detail": row.detail,
    }
    for origin in ORIGINS:
        scores = row.scores.get(origin)
        entry |= {f"ifd_{origin}": scores and scores.ifd, f"r_ifd_{origin}": scores and scores.r_ifd}
    return entry | {f"status_{origin}": row.status.get(origin, "") for origin in ORIGINS[1:]}
