"""Rows to batches, without any randomness: what a batch holds is a function of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finetune.data.render import IGNORED

__all__ = ["PackingCollator", "PaddingCollator"]


@dataclass(frozen=True)
class PaddingCollator:
    """Pads on the right, by position.

    Attributes:
        pad_token_id: Written into ``input_ids`` where there is no token; labels there are -100 whatever it is.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns a batch.

        ``input_ids``, ``labels`` and, where a row is padded, ``attention_mask``: int64 (B, T). Where rows have a task,
        ``tasks``: the names, one per row. Where they have other answers, these are rows after the right one, and
        ``options`` says how many rows each question has.
        """
        options = [1 + len(row.get("other_input_ids", ())) for row in rows]
        if max(options) > 1:
            rows = [option for row in rows for option in _options(row)]
        longest = max(len(row["input_ids"]) for row in rows)
        batch: dict[str, Any] = {
            "input_ids": _padded([row["input_ids"] for row in rows], longest, self.pad_token_id),
            "labels": _padded([row["labels"] for row in rows], longest, IGNORED),
        }
        if any(len(row["input_ids"]) < longest for row in rows):
            batch["attention_mask"] = _padded([[1] * len(row["input_ids"]) for row in rows], longest, 0)
        if "task" in rows[0]:
            batch["tasks"] = [row["task"] for row in rows]
        if max(options) > 1:
            batch["options"] = options
        return batch


class PackingCollator:
    """Batches rows of several documents, none of which attends to another.

    transformers derives the block-diagonal mask from position ids that restart, provided that there is neither an
    ``attention_mask`` nor a cache; padding is a document of its own.
    """

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns ``input_ids``, ``labels`` and ``position_ids``, int64 (B, T), and ``use_cache``: False."""
        longest = max(len(row["input_ids"]) for row in rows)
        positions = []
        for row in rows:
            documents = row.get("documents") or [len(row["input_ids"])]
            padding = longest - len(row["input_ids"])
            positions.append([place for length in (*documents, padding) for place in range(length)])
        return {
            "input_ids": _padded([row["input_ids"] for row in rows], longest, 0),
            "labels": _padded([row["labels"] for row in rows], longest, IGNORED),
            "position_ids": torch.tensor(positions),
            "use_cache": False,
        }


def _options(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a question with each of its answers, the right one first."""
    others = zip(row["other_input_ids"], row["other_labels"], strict=True)
    return [row, *({**row, "input_ids": ids, "labels": labels} for ids, labels in others)]


def _padded(rows: list[list[int]], longest: int, value: int) -> Tensor:
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])
