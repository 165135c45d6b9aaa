"""The teacher's part: every row reflected on three times, measured and logged as scorers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from finetune.data.records import Conversation, Message
from finetune.data_selection.base import Evidence, Measured, Unscored
from finetune.data_selection.chat.asking import Asking
from finetune.data_selection.chat.config import ChatConfig
from finetune.data_selection.pool import Example, Exchange
from finetune.data_selection.reflection.choice import Origin
from finetune.data_selection.reflection.prompts import (
    PROMPTS_HASH,
    Block,
    ask_for_instruction,
    ask_for_response,
    read_block,
)

if TYPE_CHECKING:
    from finetune.data_selection.chat.answer import Chat

__all__ = ["Reflections", "versions"]


class Reflections(Asking):
    """Has a teacher rewrite rows: what is measured is the versions.

    Args:
        config: Who the teacher is.
        max_new_tokens: Longest reflection, in tokens.
    """

    name: ClassVar[str] = "reflect"
    section: ClassVar[str] = "reflect"

    def __init__(self, config: ChatConfig, max_new_tokens: int) -> None:
        super().__init__(config)
        self._max_new_tokens = max_new_tokens

    def fingerprint(self) -> dict[str, Any]:
        """Returns who is asked, and what."""
        return {**super().fingerprint(), "prompts": PROMPTS_HASH, "max_new_tokens": self._max_new_tokens}

    def ask(self, chat: Chat, batch: Sequence[Example]) -> list[Measured]:
        """Returns per row ``versions``, pairs of instruction and answer by origin, and what became of each."""
        rows = [_Reflected(example) for example in batch]
        single = [row for row in rows if row.pair is not None]
        self._ask(chat, [(row, "instruction", row.pair) for row in single if row.pair])
        self._ask(chat, [(row, "response", row.pair) for row in single if row.pair])
        self._ask(chat, [(row, "both", row.versions["instruction"]) for row in rows if "instruction" in row.versions])
        return [row.measured() for row in rows]

    def _ask(self, teacher: Chat, questions: Sequence[tuple[_Reflected, Origin, Exchange]]) -> None:
        about = [ask_for_instruction if origin == "instruction" else ask_for_response for _, origin, _ in questions]
        asked = [ask(pair) for ask, (_, _, pair) in zip(about, questions, strict=True)]
        answers = teacher.ask(asked, max_new_tokens=self._max_new_tokens)
        for (row, origin, pair), answer in zip(questions, answers, strict=True):
            if isinstance(answer, Unscored):
                row.failure = answer
                continue
            row.spent.append(answer.spent)
            row.read(origin, pair, answer.text)

    def answers(self, evidence: Evidence) -> Sequence[Evidence]:
        """Returns up to three answers."""
        found: Sequence[Evidence] = evidence.get("answers", ())
        return found


class _Reflected:
    """What becomes of one row."""

    def __init__(self, example: Example) -> None:
        pairs = example.exchanges
        self.pair = pairs[0] if len(pairs) == 1 and pairs[0].instruction.strip() else None
        self.versions: dict[Origin, Exchange] = {}
        self.status: dict[str, str] = {}
        self.spent: list[dict[str, Any]] = []
        self.failure: Unscored | None = None

    def read(self, origin: Origin, pair: Exchange, answer: str) -> None:
        """Takes a version out of what the teacher wrote; one that lacks a part is none."""
        if origin == "instruction":
            blocks = [read_block(answer, "New instruction"), read_block(answer, "New answer")]
        else:
            blocks = [Block(pair.instruction, "ok"), read_block(answer, "Better answer")]
        bad = next((block.status for block in blocks if block.status != "ok"), "")
        self.status[origin] = bad or "ok"
        if not bad:
            self.versions[origin] = Exchange(blocks[0].text, blocks[1].text)

    def measured(self) -> Measured:
        """Returns the evidence of the row."""
        if self.pair is None:
            return Unscored("not one instruction with one answer")
        if self.failure is not None:
            return Unscored(self.failure.reason, self.failure.detail, {"answers": self.spent})
        written = {origin: [pair.instruction, pair.answer] for origin, pair in self.versions.items()}
        return {"versions": written, "status": self.status, "answers": self.spent}


def versions(row: Conversation, evidence: Evidence) -> dict[Origin, tuple[Message, ...]]:
    """Returns the versions of a row as messages, the original first; a system message stays as it is."""
    system = tuple(message for message in row.messages if message.role == "system")
    found: dict[Origin, tuple[Message, ...]] = {"original": row.messages}
    for origin, (instruction, answer) in evidence["versions"].items():
        found[origin] = (*system, Message("user", instruction), Message("assistant", answer))
    return found
