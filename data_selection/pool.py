"""The rows that are scored: read, rendered and cut as training would, each with a key that its content decides."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from finetune.data.load import load_conversations
from finetune.data.prepare import Truncation, check_dropped, fit_length
from finetune.data.records import Conversation, DataSource, Dropped
from finetune.data.render import IGNORED, Encoded, LossOn, render_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Example", "Exchange", "Pool", "load_pool", "pool_of"]

_BATCH = 1000


@dataclass(frozen=True)
class Exchange:
    """One question and its answer."""

    instruction: str
    answer: str


@dataclass(frozen=True)
class Example:
    """One row.

    Attributes:
        key: 16 hexadecimal digits over the content, with ``-2`` for its second occurrence and so on: what rows are told
            apart and ties are broken by, whatever the order of the file.
        conversation: What is said.
        encoded: The same as training sees it: tokens, and labels where they carry loss.
    """

    key: str
    conversation: Conversation
    encoded: Encoded

    @property
    def tokens(self) -> int:
        """All tokens."""
        return len(self.encoded.input_ids)

    @cached_property
    def answer_tokens(self) -> int:
        """Tokens that carry loss."""
        return sum(label != IGNORED for label in self.encoded.labels)

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Every answer with the user's turn before it; an alpaca row's input follows its instruction."""
        found, asked = [], ""
        for message in self.conversation.messages:
            if message.role == "assistant":
                found.append(Exchange(asked, message.content))
                asked = ""
            elif message.role == "user":
                asked = f"{asked}\n{message.content}".lstrip("\n")
        return tuple(found)


@dataclass(frozen=True)
class Pool:
    """All rows of a recipe's sources.

    Attributes:
        examples: Those that can be scored.
        dropped: The others, and why.
    """

    examples: tuple[Example, ...]
    dropped: tuple[Dropped, ...]

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits over the tokens of all rows, in order."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(json.dumps([example.key, example.encoded.input_ids, example.encoded.labels]).encode())
        return digest.hexdigest()[:16]


def load_pool(
    sources: Sequence[DataSource],
    tokenizer: PreTrainedTokenizerBase,
    *,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    system: str | None = None,
    loss_on: LossOn = "assistant",
    max_length: int = 1024,
    truncation: Truncation = "drop",
    on_error: Literal["fail", "skip"] = "fail",
    max_dropped: float = 0.1,
) -> Pool:
    """Reads and renders the rows of ``sources``; the arguments are those of a recipe's ``data`` section.

    Raises:
        DataError: A source, a row or the template is unusable, or too many rows are.
    """
    conversations, unusable = load_conversations(
        sources, format=format, columns=columns, system=system, on_error=on_error
    )
    pool = pool_of(conversations, tokenizer, loss_on=loss_on, max_length=max_length, truncation=truncation)
    dropped = (*unusable, *pool.dropped)
    check_dropped(len(pool.examples), dropped, max_dropped)
    return Pool(pool.examples, dropped)


def pool_of(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    *,
    loss_on: LossOn = "assistant",
    max_length: int = 1024,
    truncation: Truncation = "drop",
) -> Pool:
    """Returns conversations as a pool; rows that do not fit are among its dropped ones."""
    examples: list[Example] = []
    dropped: list[Dropped] = []
    seen: Counter[str] = Counter()
    for start in range(0, len(conversations), _BATCH):
        batch = conversations[start : start + _BATCH]
        for row, whole in zip(batch, render_all(batch, tokenizer, loss_on=loss_on), strict=True):
            encoded, reason = fit_length(whole, max_length, truncation)
            if reason:
                detail = f"{len(whole.input_ids)} tokens"
                dropped.append(Dropped(row.source, row.line, row.id, reason, detail))
                continue
            content = _content_hash(row)
            seen[content] += 1
            key = content if seen[content] == 1 else f"{content}-{seen[content]}"
            examples.append(Example(key, row, encoded))
    return Pool(tuple(examples), tuple(dropped))


def _content_hash(row: Conversation) -> str:
    turns = [[message.role, message.content] for message in row.messages]
    content = json.dumps([turns, row.text, row.tools], ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
