"""Rows whose answer is one of several: a column ``choices`` beside the right answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from finetune.core.errors import Problem, list_choices
from finetune.data.records import Conversation, Message

__all__ = ["choices_problem", "other_answers"]


def choices_problem(row: Conversation) -> Problem | None:
    """Returns what is wrong with the choices of a row that ends in an answer, or None."""
    choices = row.extra.get("choices")
    if not isinstance(choices, Sequence) or isinstance(choices, str) or len(choices) < 2:
        return Problem(
            "the row has no choices", row.where, got=repr(choices), want="choices: a list of two or more texts"
        )
    if not row.messages or row.messages[-1].content not in choices:
        got = row.messages[-1].content if row.messages else row.text[:60]
        return Problem("the answer is none of the choices", row.where, got=got, want=list_choices(map(str, choices)))
    return None


def other_answers(row: Conversation) -> list[Conversation]:
    """Returns the row with each of its other choices in place of the right one."""
    right = row.messages[-1].content
    wrong = [str(choice) for choice in row.extra["choices"] if choice != right]
    return [replace(row, messages=(*row.messages[:-1], Message("assistant", choice))) for choice in wrong]
