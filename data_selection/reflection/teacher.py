"""The teacher's part: every row reflected on three times, measured and logged as scorers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from finetune.data.records import Conversation, Message
from finetune.data_selection.base import Evidence, Load, Measured, Measurer, Scorer, ScorerConfig, Unscored
from finetune.data_selection.chat.config import HOW_TO_ASK, ChatConfig, bill, check_endpoint
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
    from transformers import PreTrainedTokenizerBase

    from finetune.data_selection.chat.answer import Chat

__all__ = ["Reflections", "versions"]

_SECTION = "reflect"


class Reflections(Scorer):
    """Has a teacher rewrite rows; it measures versions and scores nothing.

    Args:
        config: Who the teacher is.
        max_new_tokens: Longest reflection, in tokens.
    """

    name: ClassVar[str] = "reflect"
    Config: ClassVar[type[ScorerConfig]] = ChatConfig
    config: ChatConfig

    def __init__(self, config: ChatConfig, max_new_tokens: int) -> None:
        super().__init__(config)
        self._max_new_tokens = max_new_tokens

    def models(self, default: str) -> list[str]:
        """Returns the teacher."""
        model = self.config.model or default
        return [model if self.config.endpoint is None else f"{model} at {self.config.endpoint}"]

    def check(self, pool: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> None:
        """Sees that there is somebody to ask.

        Raises:
            ConfigError: The endpoint has no address or no model.
            DataError: The rows have no answers.
        """
        super().check(pool, tokenizer)
        check_endpoint(self.config, _SECTION)

    def fingerprint(self) -> dict[str, Any]:
        """Returns who is asked, and what."""
        who = self.config.model_dump(mode="json", exclude=set(HOW_TO_ASK))
        return {"name": self.name, **who, "prompts": PROMPTS_HASH, "max_new_tokens": self._max_new_tokens}

    def measurer(self, number: int, name: str, load: Load, pool: Sequence[Example]) -> Measurer:
        """Returns what asks the teacher."""
        from finetune.data_selection.chat.connect import connect

        teacher = connect(self.config, name, load, _SECTION)
        return lambda batch: self._reflect(teacher, batch)

    def _reflect(self, teacher: Chat, batch: Sequence[Example]) -> list[Measured]:
        """Returns per row ``versions``, pairs of instruction and answer by origin, and what became of each."""
        rows = [_Reflected(example) for example in batch]
        single = [row for row in rows if row.pair is not None]
        self._ask(teacher, [(row, "instruction", row.pair) for row in single if row.pair])
        self._ask(teacher, [(row, "response", row.pair) for row in single if row.pair])
        self._ask(
            teacher, [(row, "both", row.versions["instruction"]) for row in rows if "instruction" in row.versions]
        )
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

    def spent(self, measured: Sequence[Sequence[Evidence] | Unscored]) -> dict[str, Any]:
        """Returns the bill of all reflections."""
        evidence = [row.evidence if isinstance(row, Unscored) else row[0] for row in measured]
        return bill(self.config, [answer for row in evidence for answer in row.get("answers", ())])


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
