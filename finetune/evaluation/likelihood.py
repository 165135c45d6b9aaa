"""Log-likelihoods of labelled tokens, reduced batch by batch: logits are never kept.

Legend: B rows, T tokens of the longest row, P positions whose next token is labelled in any row, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.core.errors import DataError
from finetune.models.batches import by_length, padded, scoring

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["LabelledRow", "RowLikelihood", "row_likelihoods"]

IGNORED = -100
_LOGITS_AT_A_TIME = 2**26
"""Logits (B x P x V) that one forward pass may hold, 256 MB in float32; longer batches are split."""
_POSITIONS_AT_A_TIME = 256
"""Positions whose float32 log-softmax exists at a time."""


@dataclass(frozen=True)
class LabelledRow:
    """One row: token ids, and the same ids as labels with -100 where a token is not scored."""

    input_ids: Sequence[int]
    labels: Sequence[int]


@dataclass(frozen=True)
class RowLikelihood:
    """What a model thinks of one row.

    Attributes:
        log_likelihood: The sum over the labelled tokens, in nats.
        tokens: How many labelled tokens there are.
    """

    log_likelihood: float
    tokens: int


def row_likelihoods(
    model: nn.Module,
    rows: Sequence[LabelledRow],
    *,
    batch_size: int,
    progress: Callable[[int], object] | None = None,
) -> list[RowLikelihood]:
    """Returns the log-likelihood of each row, in order.

    Only positions before a labelled token reach the output head. The result does not depend on ``batch_size`` beyond
    rounding: rows are padded on the right, where a causal model does not look.

    Args:
        model: A causal LM, plain or wrapped by PEFT.
        rows: Rows with at least one token each; the first token of a row has no context and is never scored.
        batch_size: Rows of one forward pass, fewer where their logits would take too much memory.
        progress: Called with the number of rows that were just finished.

    Raises:
        DataError: A row has no token.
    """
    empty = [position for position, row in enumerate(rows) if not row.input_ids]
    if empty:
        raise DataError("rows without a token cannot be scored", got=f"rows {empty[:10]}")
    found: list[RowLikelihood | None] = [None] * len(rows)
    order = by_length([len(row.input_ids) for row in rows])
    vocabulary = _vocabulary_size(model)
    with scoring(model):
        while order:
            size = min(batch_size, len(order))
            while size > 1 and size * len(_kept(rows, order[:size])) * vocabulary > _LOGITS_AT_A_TIME:
                size = (size + 1) // 2
            batch, order = order[:size], order[size:]
            for position, result in zip(batch, _batch_likelihoods(model, [rows[i] for i in batch]), strict=True):
                found[position] = result
            if progress is not None:
                progress(size)
    scored = [result for result in found if result is not None]
    if len(scored) != len(rows):
        raise RuntimeError(f"scored {len(scored)} of {len(rows)} rows")
    return scored


def _kept(rows: Sequence[LabelledRow], batch: Sequence[int]) -> list[int]:
    """Returns the positions whose next token is labelled in any row of ``batch``."""
    kept = {
        position - 1
        for row in batch
        for position, label in enumerate(rows[row].labels)
        if label != IGNORED and position > 0
    }
    return sorted(kept)


def _batch_likelihoods(model: Any, rows: Sequence[LabelledRow]) -> list[RowLikelihood]:
    import torch
    import torch.nn.functional as F

    device = next(model.parameters()).device
    kept = _kept(rows, range(len(rows)))
    if not kept:
        return [RowLikelihood(0.0, 0)] * len(rows)
    ids_BT, mask_BT = padded([row.input_ids for row in rows], 0, "right", device)
    labels_BT, _ = padded([row.labels for row in rows], IGNORED, "right", device)
    positions_P = torch.tensor(kept, device=device)
    logits_BPV = _logits(model, ids_BT, mask_BT, positions_P)
    targets = labels_BT[:, positions_P + 1].flatten()
    flat = logits_BPV.flatten(0, 1)
    row_of = torch.arange(len(rows), device=device).repeat_interleave(len(kept))
    sums = torch.zeros(len(rows), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    labelled = (targets != IGNORED).nonzero().flatten()
    for start in range(0, len(labelled), _POSITIONS_AT_A_TIME):
        chunk = labelled[start : start + _POSITIONS_AT_A_TIME]
        losses = F.cross_entropy(flat[chunk].float(), targets[chunk], reduction="none")
        sums.index_add_(0, row_of[chunk], -losses.to(sums.dtype))
    counts = torch.bincount(row_of[labelled], minlength=len(rows))
    return [RowLikelihood(*pair) for pair in zip(sums.tolist(), counts.tolist(), strict=True)]


def _logits(model: Any, ids_BT: Tensor, mask_BT: Tensor | None, positions_P: Tensor) -> Tensor:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    inputs = {"input_ids": ids_BT, "use_cache": False}
    if mask_BT is not None:
        inputs["attention_mask"] = mask_BT
    # Counted from the end: a PEFT prompt tuner puts virtual tokens before the row.
    from_end_P = positions_P - ids_BT.shape[1]
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        kept: Tensor = model(**inputs, logits_to_keep=from_end_P).logits
        return kept
    whole: Tensor = model(**inputs).logits
    return whole[:, from_end_P]


def _vocabulary_size(model: Any) -> int:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return int(base.config.get_text_config().vocab_size)
