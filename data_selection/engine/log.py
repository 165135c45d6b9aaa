"""What was measured, appended batch by batch: one line of JSON per batch, written at once.

A process that is killed in the middle of a line leaves a line without its end, which counts as not written. Each
process has a file of its own, and all read all files, so a run may go on with another number of processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.data_selection.base import Measured, Unscored

__all__ = ["Batches", "ScoreLog"]

Batches = dict[tuple[int, int], dict[int, Measured]]
"""(Number of the model, number of the batch) -> position of a row -> what was measured on it."""


class ScoreLog:
    """The log of one scoring.

    Args:
        folder: Where the files are; made when something is appended.
        rank: The number of this process.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder
        self._file = folder / f"{rank}.jsonl"
        self._is_whole = False

    def read(self) -> Batches:
        """Returns every batch that was appended by any process; of one that was measured again, the better attempt."""
        found: Batches = {}
        for file in sorted(self._folder.glob("*.jsonl")):
            for line in _whole_lines(file.read_bytes()).splitlines():
                entry = json.loads(line)
                rows = {int(position): _measured(row) for position, row in entry["rows"].items()}
                key = entry["model"], entry["batch"]
                if key not in found or _failed(rows) <= _failed(found[key]):
                    found[key] = rows
        return found

    def append(self, model: int, batch: int, rows: Mapping[int, Measured]) -> None:
        """Appends one batch; when this returns, it is on the disk."""
        entry = {"model": model, "batch": batch, "rows": {position: _plain(row) for position, row in rows.items()}}
        line = json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n"
        if not self._is_whole:
            self._cut_off_half_a_line()
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            content = memoryview(line.encode())
            while content:
                content = content[os.write(descriptor, content) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _cut_off_half_a_line(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            os.truncate(self._file, len(_whole_lines(self._file.read_bytes())))
        self._is_whole = True


def _failed(rows: Mapping[int, Measured]) -> int:
    return sum(isinstance(row, Unscored) for row in rows.values())


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _plain(row: Measured) -> object:
    return [row.reason, row.detail, row.evidence] if isinstance(row, Unscored) else row


def _measured(row: Mapping[str, Any] | Sequence[Any]) -> Measured:
    return row if isinstance(row, Mapping) else Unscored(*row)
