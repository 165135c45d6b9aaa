"""Rows of the task that rows are chosen for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.core.errors import ConfigError
from finetune.core.files import hash_file
from finetune.core.shipped import resolve_data_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data_selection.pool import Example

__all__ = ["check_targets", "hash_target", "read_target"]


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


def check_targets(paths: Sequence[str], rows: int, tokenizer: PreTrainedTokenizerBase, *, scorer: str) -> None:
    """Sees that there is a target for a scorer to go by.

    Args:
        paths: Its files.
        rows: Rows of each that are used, the first ones.
        tokenizer: Renders them.
        scorer: Who goes by them.

    Raises:
        ConfigError: None is named, or there is no such file.
        DataError: Its rows cannot be read.
    """
    missing = [path for path in paths if not Path(resolve_data_path(path)).is_file()]
    if missing or not any(paths):
        raise ConfigError(
            f"{scorer} chooses rows for a target task, and there is none",
            where="select.scorer.target",
            got=", ".join(filter(None, missing)) or "nothing",
            want="a file with 10 to 500 rows of the target task",
        )
    for path in paths:
        read_target(path, rows, tokenizer)


def hash_target(path: str) -> str:
    """Returns the hash of a file's content, which tells targets apart whatever they are called."""
    return hash_file(Path(resolve_data_path(path)))


def read_target(path: str, rows: int, tokenizer: PreTrainedTokenizerBase) -> Sequence[Example]:
    """Returns the first ``rows`` of a file, rendered; those that are too long are cut at their ends.

    Raises:
        DataError: The rows cannot be read.
    """
    from finetune.data.load import load_conversations
    from finetune.data_selection.pool import pool_of

    conversations, _ = load_conversations([_Target(path)])
    return pool_of(conversations[:rows], tokenizer, truncation="right").examples
