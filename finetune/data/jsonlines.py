"""Reads JSON Lines strictly: what is not one plain object a line is said with line, column and excerpt."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

__all__ = ["BadRowError", "decode_text", "parse_lines", "parse_object"]

_EXCERPT = 60
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class BadRowError(ValueError):
    """A row that cannot be read; the text says why.

    Args:
        reason: What is wrong, short, the same for rows with the same fault.
        detail: Column and excerpt.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


def decode_text(content: bytes) -> str:
    """Returns the text of a UTF-8 file, without its byte order mark.

    Raises:
        BadRowError: The file is UTF-16, or not UTF-8.
    """
    if content.startswith(_UTF16):
        raise BadRowError("the file is UTF-16, not UTF-8", "iconv -f UTF-16 -t UTF-8 FILE > NEW")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadRowError("the file is not UTF-8", f"byte {error.start}, line {line}: {error.reason}") from error


def parse_lines(text: str) -> Iterator[tuple[int, dict[str, Any] | BadRowError]]:
    """Yields line number, counted from 1, and the object or what is wrong with it; blank lines are passed over."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, parse_object(line.rstrip("\r"))
            except BadRowError as bad:
                yield number, bad


def parse_object(line: str) -> dict[str, Any]:
    """Returns the JSON object in ``line``.

    Raises:
        BadRowError: It is no valid JSON, no object, or holds a key twice, a NaN, or a lone surrogate.
    """
    try:
        value = json.loads(line, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        start = max(0, error.pos - _EXCERPT // 2)
        excerpt = line[start : start + _EXCERPT]
        raise BadRowError("the line is not valid JSON", f"column {error.pos + 1}: {error.msg}: {excerpt!r}") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        hint = "; name a file with one JSON array .json" if isinstance(value, list) else ""
        raise BadRowError("the line is not a JSON object", f"a {kind}: {line[:_EXCERPT]!r}{hint}")
    try:
        line.encode()
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRowError("the line holds half a surrogate pair, which is no character", str(error)) from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRowError("the line holds a key twice", f"key {twice!r}")
    return value


def _refuse_constant(name: str) -> None:
    raise BadRowError("the line holds a number that JSON does not have", name)
