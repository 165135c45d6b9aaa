"""Rows of the task that rows are chosen for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data_selection.pool import Example

__all__ = ["read_target"]


@dataclass(frozen=True)
class _Target:
    """The target as a data source."""

    path: str
    split: str | None = None
    weight: float = 1.0
    format: str | None = None
    subset: str | None = None
    columns: Mapping[str, str] | None = None
    task: str | None = None


def read_target(path: str, rows: int, tokenizer: PreTrainedTokenizerBase) -> Sequence[Example]:
    """Returns the first ``rows`` of a file, rendered; those that are too long are cut at their ends.

    Raises:
        DataError: The rows cannot be read.
    """
    from finetune.data.load import load_conversations
    from finetune.data_selection.pool import pool_of

    conversations, _ = load_conversations([_Target(path)])
    return pool_of(conversations[:rows], tokenizer, truncation="right").examples
