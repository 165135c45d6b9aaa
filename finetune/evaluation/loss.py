"""Held-out loss: the sum of token losses over the whole set, divided by its number of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.core.errors import DataError
from finetune.evaluation.likelihood import LabelledRow, RowLikelihood, row_likelihoods

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LossResult", "heldout_loss", "mean_loss"]


@dataclass(frozen=True)
class LossResult:
    """The held-out loss.

    Attributes:
        loss: Nats per labelled token.
        perplexity: ``exp(loss)``.
        tokens: Labelled tokens.
        rows: Rows that were scored, which is all of them.
    """

    loss: float
    perplexity: float
    tokens: int
    rows: int


def heldout_loss(
    model: nn.Module,
    dataset: Iterable[Mapping[str, Any]],
    batch_size: int,
    *,
    progress: Callable[[int], object] | None = None,
) -> LossResult:
    """Returns the mean loss of the labelled tokens of ``dataset``.

    A row without a labelled token adds nothing, so the result is never NaN because of one.

    Args:
        model: A causal LM, plain or wrapped by PEFT.
        dataset: Rows with ``input_ids`` and ``labels``, and with ``documents`` (their lengths) where rows are packed.
        batch_size: Rows of one forward pass.
        progress: Called with the number of rows (documents where packed) that were just finished.

    Raises:
        DataError: No row has a labelled token.
    """
    rows = [row for packed in dataset for row in _documents(packed)]
    return mean_loss(row_likelihoods(model, rows, batch_size=batch_size, progress=progress))


def mean_loss(rows: Sequence[RowLikelihood]) -> LossResult:
    """Returns the loss over rows whose likelihoods are known.

    Raises:
        DataError: No row has a labelled token.
    """
    tokens = sum(row.tokens for row in rows)
    if tokens == 0:
        raise DataError("no held-out row has a token that carries loss", want="data.loss_on that fits the rows")
    loss = -math.fsum(row.log_likelihood for row in rows) / tokens
    return LossResult(loss, math.exp(loss) if loss < 700 else math.inf, tokens, len(rows))


def _documents(row: Mapping[str, Any]) -> Iterator[LabelledRow]:
    """Yields the documents of a packed row: each is scored as if it stood alone."""
    start = 0
    for length in row.get("documents") or [len(row["input_ids"])]:
        yield LabelledRow(row["input_ids"][start : start + length], row["labels"][start : start + length])
        start += length
