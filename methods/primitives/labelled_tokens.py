"""What a model thinks of the labelled tokens of each row, whatever loss it would make of them."""

# Legend: R rows, U distinct rows, T tokens of a row, P positions before a label of any row, V vocabulary

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["IGNORED", "LabelledTokens", "score_labelled_tokens"]

IGNORED = -100


@dataclass(frozen=True)
class LabelledTokens:
    """Scores of rows.

    Attributes:
        log_likelihood: Mean over the labelled tokens of each row, float32 (R,); a row without any has 0.
        exact: Whether each labelled token is the likeliest one, bool (R,): what greedy decoding would answer.
    """

    log_likelihood: Tensor
    exact: Tensor


def score_labelled_tokens(model: Any, batch: dict[str, Any]) -> LabelledTokens:
    """Returns the scores of a padded batch in one forward pass over its distinct rows.

    The last labelled token is not looked at by the model, so rows that differ only there, such as options of one token
    each, are one row of the pass.

    Args:
        model: A causal LM, plain or wrapped by PEFT.
        batch: ``input_ids`` and ``labels``, int64 (R, T), and what else the model takes.
    """
    labels_RT: Tensor = batch["labels"]
    places = torch.arange(labels_RT.shape[1], device=labels_RT.device)
    labelled = labels_RT != IGNORED
    last_R = torch.where(labelled, places, 0).amax(1)
    seen_RT = places < last_R[:, None]
    mask = batch.get("attention_mask")
    mask_RT = seen_RT.long() if mask is None else mask * seen_RT
    rows = torch.stack([batch["input_ids"] * mask_RT, mask_RT])
    others = {key: value for key, value in batch.items() if key not in ("input_ids", "attention_mask", "labels")}
    if others:  # they may be one per row
        distinct, row_of = rows, torch.arange(len(labels_RT), device=labels_RT.device)
    else:
        distinct, row_of = torch.unique(rows, dim=1, return_inverse=True)
    before_P = labelled[:, 1:].any(0).nonzero().flatten()
    inputs = {**others, "input_ids": distinct[0], "attention_mask": distinct[1], "use_cache": False}
    logits_UPV = _logits(model, inputs, before_P)
    targets_RP = labels_RT[:, before_P + 1]
    counted = targets_RP != IGNORED
    row, place = counted.nonzero(as_tuple=True)
    logits_NV = logits_UPV[row_of[row], place].float()
    targets_N = targets_RP[row, place]
    gone = F.cross_entropy(logits_NV, targets_N, reduction="none")
    count_R = counted.sum(1)
    sums = torch.zeros(len(labels_RT), device=gone.device).index_add_(0, row, -gone)
    right = torch.zeros_like(count_R).index_add_(0, row, (logits_NV.argmax(1) == targets_N).long())
    return LabelledTokens(sums / count_R.clamp(min=1), right == count_R)


def _logits(model: Any, inputs: dict[str, Any], kept_P: Tensor) -> Tensor:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    # Counted from the end: a PEFT prompt tuner puts virtual tokens before the row.
    from_end_P = kept_P - inputs["input_ids"].shape[1]
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        kept: Tensor = model(**inputs, logits_to_keep=from_end_P).logits
        return kept
    whole: Tensor = model(**inputs).logits
    return whole[:, from_end_P]
