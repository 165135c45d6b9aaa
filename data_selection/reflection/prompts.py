"""What the teacher is asked, and how its answer is read."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from finetune.data.records import Message
from finetune.data_selection.pool import Exchange

__all__ = ["PROMPTS_HASH", "Block", "ask_for_instruction", "ask_for_response", "read_block"]

_ROLE = "You examine pairs of an instruction and an answer strictly and help to make them better."
_PAIR = "[Given instruction]\n{instruction}\n\n[Given answer]\n{answer}\n\n"
_HERE = "..."
_FORM = "[{name}]\n" + _HERE + "\n[End of {name}]"
_INSTRUCTION = (
    _PAIR + "First criticise the given instruction: how complex its topic is, how much detail and knowledge it asks "
    "for, whether it is ambiguous, whether it takes reasoning. Then criticise the answer: is it helpful, relevant, "
    "accurate, detailed? Say how a weak instruction led to a weak answer.\nThen write a new instruction that is harder "
    "and stands by itself, and a detailed answer to it, each between its markers and nowhere else:\n\n"
    + _FORM.format(name="New instruction")
    + "\n"
    + _FORM.format(name="New answer")
)
_RESPONSE = (
    _PAIR + "Criticise the given answer to the instruction: is it helpful, relevant, accurate, detailed?\nThen write a "
    "better and complete answer to the same instruction, between its markers and nowhere else:\n\n"
    + _FORM.format(name="Better answer")
)
PROMPTS_HASH = hashlib.sha256("\0".join([_ROLE, _INSTRUCTION, _RESPONSE]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Block:
    """What stands between two markers.

    Attributes:
        text: The text, or nothing.
        status: ``ok``, or why there is none.
    """

    text: str
    status: str


def ask_for_instruction(pair: Exchange) -> list[Message]:
    """Returns the question about an instruction; the answer has the blocks ``New instruction`` and ``New answer``."""
    return [Message("system", _ROLE), Message("user", _INSTRUCTION.format(**vars(pair)))]


def ask_for_response(pair: Exchange) -> list[Message]:
    """Returns the question about a response; the answer has the block ``Better answer``."""
    return [Message("system", _ROLE), Message("user", _RESPONSE.format(**vars(pair)))]


def read_block(answer: str, name: str) -> Block:
    """Returns what the teacher wrote between the markers of ``name``.

    There must be one such block; a text that was cut off before its end marker counts, unless another block begins.
    """
    begin, end = re.escape(f"[{name}]"), re.escape(f"[End of {name}]")
    parts = re.split(begin, answer, flags=re.IGNORECASE)
    if len(parts) == 1:
        return Block("", "no marker")
    if len(parts) > 2:
        return Block("", "several blocks")
    text = re.split(rf"{end}|\[(?:End of )?New (?:instruction|answer)\]", parts[1], flags=re.IGNORECASE)[0].strip()
    if text == _HERE:
        return Block("", "the placeholder")
    if text.lower().strip(".") in ("", "n/a", "none"):
        return Block("", "empty")
    return Block(text, "ok")
