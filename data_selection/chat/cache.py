"""What endpoints answered, in one file on this machine, so that nothing is paid for twice."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from finetune.data_selection.chat.answer import Answer

__all__ = ["AnswerCache", "request_key"]

_PATIENCE = 60
"""Seconds to wait while others write."""


def request_key(url: str, asked: Mapping[str, Any]) -> str:
    """Returns 64 hexadecimal digits over an address and a request: its model, messages and parameters."""
    return hashlib.sha256(json.dumps([url, asked], sort_keys=True).encode()).hexdigest()


class AnswerCache:
    """Answers by the hash of their request; threads and processes may share it.

    Args:
        file: Where they are; made with the first answer.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def get(self, key: str) -> Answer | None:
        """Returns the answer, marked as cached, or None."""
        if not self._file.exists():
            return None
        with self._connected() as connection:
            found = connection.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if found is None else replace(Answer(**json.loads(found[0])), cached=True)

    def put(self, key: str, answer: Answer) -> None:
        """Keeps an answer; when this returns, it is on the disk."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._connected() as connection:
            values = key, json.dumps(asdict(answer))
            connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", values)

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        # A connection belongs to one thread, and opening one takes less than a millisecond.
        with closing(sqlite3.connect(self._file, timeout=_PATIENCE)) as connection, connection:
            connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
            yield connection
