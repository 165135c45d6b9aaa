"""Examples token by token, as the model sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.data.render import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.prepare import PreparedData

__all__ = ["inspect_rows", "mark_loss"]


def inspect_rows(prepared: PreparedData, tokenizer: PreTrainedTokenizerBase, count: int) -> list[dict[str, Any]]:
    """Returns the first ``count`` examples: ``text`` with the loss in brackets, ``tokens`` with id, text and loss."""
    rows = []
    for row in prepared.dataset.select(range(min(count, len(prepared.dataset)))):
        tokens = [
            {"id": token, "text": tokenizer.decode([token]), "loss": label != IGNORED}
            for token, label in zip(row["input_ids"], row["labels"], strict=True)
        ]
        rows.append({"text": mark_loss(row["input_ids"], row["labels"], tokenizer), "tokens": tokens})
    return rows


def mark_loss(input_ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the text of an example with each stretch under the loss in square brackets."""
    pieces, start = [], 0
    learned = [label != IGNORED for label in labels]
    for end in range(1, len(input_ids) + 1):
        if end == len(input_ids) or learned[end] != learned[start]:
            text = str(tokenizer.decode(input_ids[start:end]))
            pieces.append(f"[{text}]" if learned[start] else text)
            start = end
    return "".join(pieces)
