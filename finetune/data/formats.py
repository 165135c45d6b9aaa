"""The forms that rows come in, told by their columns, and how each becomes messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from finetune.data.jsonlines import BadRowError
from finetune.data.records import Message

__all__ = ["COLUMNS", "convert", "detect"]

COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
"""Format -> the columns that a row must have."""

_USED = ("messages", "conversations", "instruction", "input", "output", "system", "history", "prompt", "completion")
_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_NO_INPUT = ("", "<no input>", "<noinput>", "n/a", "none")

Parts = tuple[tuple[Message, ...], str]
"""Messages, and plain text where there are none."""


def detect(row: Mapping[str, Any]) -> str | None:
    """Returns the format whose columns ``row`` has, or None."""
    return next((name for name, columns in COLUMNS.items() if all(column in row for column in columns)), None)


def convert(row: Mapping[str, Any], format_name: str) -> tuple[Parts, dict[str, Any]]:
    """Returns what is said in ``row``, and its other columns.

    Raises:
        BadRowError: A column is missing, or holds something else than it should.
    """
    missing = [column for column in COLUMNS[format_name] if row.get(column) is None]
    if missing:
        raise BadRowError(
            "a column is missing", f"{missing[0]!r} of format {format_name}; the row has {', '.join(row)}"
        )
    messages, text = _CONVERTERS[format_name](row)
    if messages and not any(message.role == "assistant" for message in messages):
        raise BadRowError("there is no answer to learn")
    if any(message.role == "assistant" and not message.content.strip() for message in messages):
        raise BadRowError("an answer is empty")
    used = {*_USED, "text"} if format_name == "text" else _USED
    return (messages, text), {name: value for name, value in row.items() if name not in used}


def _messages(row: Mapping[str, Any]) -> Parts:
    return _turns(row["messages"], "messages", "role", "content"), ""


def _sharegpt(row: Mapping[str, Any]) -> Parts:
    turns = _turns(row["conversations"], "conversations", "from", "value")
    return _with_system(row, turns), ""


def _alpaca(row: Mapping[str, Any]) -> Parts:
    instruction, given = _text(row, "instruction"), _text(row, "input")
    prompt = instruction if given.strip().lower() in _NO_INPUT else f"{instruction}\n{given}"
    history = row.get("history") or []
    if not isinstance(history, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise BadRowError("history is not a list of pairs", repr(history)[:60])
    earlier = [
        Message(role, str(said)) for pair in history for role, said in zip(("user", "assistant"), pair, strict=True)
    ]
    turns = (*earlier, Message("user", prompt), Message("assistant", _text(row, "output")))
    return _with_system(row, turns), ""


def _prompt_completion(row: Mapping[str, Any]) -> Parts:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        turns = _turns(prompt, "prompt", "role", "content") + _turns(completion, "completion", "role", "content")
    else:
        turns = (Message("user", _text(row, "prompt")), Message("assistant", _text(row, "completion")))
    return _with_system(row, turns), ""


def _plain_text(row: Mapping[str, Any]) -> Parts:
    text = _text(row, "text")
    if not text.strip():
        raise BadRowError("the text is empty")
    return (), text


_CONVERTERS: dict[str, Callable[[Mapping[str, Any]], Parts]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "text": _plain_text,
}


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRowError("a text column holds no text", f"{column}: {value!r}"[:80])
    return value


def _with_system(row: Mapping[str, Any], turns: tuple[Message, ...]) -> tuple[Message, ...]:
    system = _text(row, "system")
    return (Message("system", system), *turns) if system else turns


def _turns(value: Any, column: str, role_key: str, content_key: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadRowError("the conversation is not a list of turns", f"{column}: {value!r}"[:80])
    return tuple(_turn(turn, role_key, content_key) for turn in value)


def _turn(turn: Any, role_key: str, content_key: str) -> Message:
    if not isinstance(turn, Mapping) or role_key not in turn:
        raise BadRowError(f"a turn has no {role_key!r}", repr(turn)[:80])
    role = _ROLES.get(str(turn[role_key]))
    if role is None:
        raise BadRowError("a turn has an unknown role", f"{turn[role_key]!r}; known are {', '.join(_ROLES)}")
    content = _content(turn.get(content_key))
    calls = turn.get("tool_calls")
    return Message(role, content + json.dumps(calls, ensure_ascii=False) if calls else content)


def _content(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        if any(not isinstance(part, Mapping) or part.get("type", "text") != "text" for part in value):
            raise BadRowError("a message holds something else than text", repr(value)[:80])
        return "".join(_content(part.get("text", part.get("value"))) for part in value)
    if not isinstance(value, str):
        raise BadRowError("a message's content is no text", repr(value)[:80])
    return value
