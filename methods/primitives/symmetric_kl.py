"""The symmetric Kullback-Leibler divergence of two passes, without a float32 copy of either pass's logits."""

# Legend: N positions, V vocabulary, D model width

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["CHUNK", "symmetric_kl", "symmetric_kl_of_hidden"]

CHUNK = 256
"""Positions whose distributions exist at a time in float32."""


def symmetric_kl(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """Returns ``sum_n (KL(q || p) + KL(p || q)) / 2`` of the distributions that logits mean, each target detached.

    Args:
        p_NV: Logits of one pass, any floating dtype.
        q_NV: Logits of the other.

    Returns:
        The sum over positions, float32 () (float64 of float64 logits).
    """
    found: Tensor = _SymmetricKL.apply(p_NV, q_NV)  # type: ignore[no-untyped-call]
    return found


def symmetric_kl_of_hidden(p_ND: Tensor, q_ND: Tensor, head: nn.Linear) -> Tensor:
    """Returns :func:`symmetric_kl` of ``head`` on hidden states; no more than :data:`CHUNK` rows of logits exist."""

    def of_chunk(p: Tensor, q: Tensor) -> Tensor:
        return symmetric_kl(F.linear(p, head.weight, head.bias), F.linear(q, head.weight, head.bias))

    total = p_ND.new_zeros((), dtype=torch.float32)
    for p, q in zip(torch.split(p_ND, CHUNK), torch.split(q_ND, CHUNK), strict=True):
        total = total + checkpoint(of_chunk, p, q, use_reentrant=False, preserve_rng_state=False)
    return total


class _SymmetricKL(torch.autograd.Function):
    """With detached targets the gradient is ``(P - Q) / 2`` for the logits of p, and its negative for those of q."""

    @staticmethod
    def forward(ctx: Any, p_NV: Tensor, q_NV: Tensor) -> Tensor:
        ctx.save_for_backward(p_NV, q_NV)
        wide = torch.promote_types(p_NV.dtype, torch.float32)
        total = p_NV.new_zeros((), dtype=wide)
        for p, q in zip(torch.split(p_NV, CHUNK), torch.split(q_NV, CHUNK), strict=True):
            log_p, log_q = p.to(wide).log_softmax(-1), q.to(wide).log_softmax(-1)
            total += ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum()
        return total / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        p_NV, q_NV = ctx.saved_tensors
        wide = gradients[0].dtype
        gradient_NV = torch.empty_like(p_NV)
        chunks = (torch.split(rows, CHUNK) for rows in (p_NV, q_NV, gradient_NV))
        for p, q, gradient in zip(*chunks, strict=True):
            gradient.copy_((p.to(wide).softmax(-1) - q.to(wide).softmax(-1)) * (gradients[0] / 2))
        return gradient_NV, -gradient_NV
