"""The loss of two passes that differ in what they drew: ``CE(p) + beta CE(q) + gamma symKL(p, q)``."""

# Legend: B rows, T tokens of a row, V vocabulary, D model width, N labelled positions of the batch

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from finetune.core.errors import CapabilityError
from finetune.methods.primitives.projections import out_features
from finetune.methods.primitives.symmetric_kl import symmetric_kl, symmetric_kl_of_hidden

__all__ = ["two_passes"]

_IGNORED = -100


def two_passes(run: Callable[..., Any], model: Any, kwargs: dict[str, Any], *, beta: float, gamma: float) -> Any:
    """Runs a causal LM twice and returns the output of the first pass with the loss of both.

    The cross entropies are the model's own. The divergence is averaged as transformers averages them: over the labelled
    positions, or over ``num_items_in_batch`` where a trainer accumulates gradients.

    Args:
        run: ``run(number, **kwargs)`` runs pass 0 or 1.
        model: The causal LM.
        kwargs: What it is called with; ``labels``: int64 (B, T).
        beta: Weight of the second pass's cross entropy.
        gamma: Weight of the divergence.

    Raises:
        CapabilityError: The model has no logits where it has labels, as some fused losses do.
    """
    wants_tuple = kwargs.get("return_dict") is False
    kwargs = {**kwargs, "return_dict": True}
    index = _labelled(kwargs)
    p = run(0, **kwargs)
    head = model.get_output_embeddings()
    rows_p = _rows(p.logits, index, kwargs["labels"])
    # A loss that never forms all logits has kept what the head would have been given.
    hidden = rows_p.shape[-1] != out_features(head)
    kwargs["use_cache"] = False
    if beta:
        q = run(1, **kwargs)
        rows_q, loss_q = _rows(q.logits, index, kwargs["labels"]), q.loss
    else:
        rows_q, loss_q = _second_rows(run, head, kwargs, index, hidden=hidden), None
    divergence = symmetric_kl_of_hidden(rows_p, rows_q, head) if hidden else symmetric_kl(rows_p, rows_q)
    items = kwargs.get("num_items_in_batch")
    divergence = divergence / (len(index) if items is None else items)
    p.loss = p.loss + gamma * divergence + (0.0 if loss_q is None else beta * loss_q)
    return p.to_tuple() if wants_tuple else p


def _labelled(kwargs: dict[str, Any]) -> Tensor:
    """Returns which of the B T positions predict a label, int64 (N,); on an accelerator the host waits once for it."""
    shifted = kwargs.get("shift_labels")
    if shifted is None:
        shifted = F.pad(kwargs["labels"], (0, 1), value=_IGNORED)[:, 1:]
    return cast(Tensor, (shifted.reshape(-1) != _IGNORED).nonzero().squeeze(1))


def _rows(logits: Tensor | None, index: Tensor, labels: Tensor) -> Tensor:
    """Returns what the model made of the labelled positions: logits (N, V), or hidden states (N, D)."""
    if logits is None:
        raise CapabilityError(
            "the divergence of two passes needs logits, and this model's loss leaves none",
            where="method.gamma",
            fix="method.gamma: 0, or train.use_liger_kernel: false",
        )
    if logits.shape[:2] == labels.shape:
        return logits.flatten(0, 1).index_select(0, index.to(logits.device))
    return logits.squeeze(0)


def _second_rows(
    run: Callable[..., Any], head: nn.Module, kwargs: dict[str, Any], index: Tensor, *, hidden: bool
) -> Tensor:
    """Runs the second pass without a loss; its head sees the labelled positions only, or none where it is not asked."""
    kept: list[Tensor] = []

    def cut(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rows = given[0].flatten(0, 1).index_select(0, index.to(given[0].device))
        kept.append(rows)
        return (rows[None, :0] if hidden else rows[None], *given[1:])

    handle = head.register_forward_pre_hook(cut)
    try:
        left_out = ("labels", "shift_labels", "num_items_in_batch")
        logits: Tensor = run(1, **{key: value for key, value in kwargs.items() if key not in left_out}).logits
    finally:
        handle.remove()
    return kept[0] if hidden else logits.squeeze(0)
