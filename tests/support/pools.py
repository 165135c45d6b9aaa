"""Small pools of rows for tests of data selection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.data.records import Conversation, Message
from finetune.data_selection.pool import Example, pool_of

__all__ = ["PAIRS", "conversation", "examples"]

PAIRS = (
    ("What is the capital of France?", "Paris."),
    ("Say at noon in cron.", "0 12 * * * /usr/bin/backup"),
    ("Who jumps?", "every day at noon the quick brown fox jumps over the lazy dog"),
    ("Name a dog.", "the lazy dog"),
    ("Over what?", "over the lazy dog"),
    ("When is it?", "every day at noon, every day at noon, every day at noon, every day"),
    ("Greet me with many words, please, as an assistant of the system does.", "Hello."),
)
"""Question and answer."""


def conversation(*turns: str, number: int = 0) -> Conversation:
    """Returns a conversation of user and assistant in turn."""
    roles = ("user", "assistant")
    messages = tuple(Message(roles[place % 2], text) for place, text in enumerate(turns))
    return Conversation(messages, str(number), "rows.jsonl", number + 1, number=number)


def examples(tokenizer: Any, rows: Sequence[Sequence[str]] = PAIRS, **options: Any) -> tuple[Example, ...]:
    """Returns question-and-answer rows as a pool's examples."""
    conversations = [conversation(*turns, number=number) for number, turns in enumerate(rows)]
    return pool_of(conversations, tokenizer, **options).examples
