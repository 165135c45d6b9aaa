"""Rows of token ids as rectangles, and a model in the state in which it is scored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from finetune.core.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["by_length", "padded", "scoring"]


def by_length(lengths: Sequence[int]) -> list[int]:
    """Returns the positions of the rows, longest first, so that too little memory shows at once."""
    return sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))


def padded(
    rows: Sequence[Sequence[int]], fill: int, side: Literal["left", "right"], device: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Returns the rows as one rectangle and the mask of what is not padding.

    Args:
        rows: B rows of token ids or labels.
        fill: What stands in the padding.
        side: Where the padding goes.
        device: Where the tensors go.

    Shape:
        (B, T) int64 and (B, T) int64, T the longest row. The mask is None where no row is padded: attention without a
        mask takes the faster path.
    """
    import torch

    longest = max(len(row) for row in rows)
    gaps = [longest - len(row) for row in rows]
    filled = [
        [*[fill] * gap, *row] if side == "left" else [*row, *[fill] * gap] for row, gap in zip(rows, gaps, strict=True)
    ]
    ids = torch.tensor(filled, dtype=torch.int64, device=device)
    if not any(gaps):
        return ids, None
    steps = torch.arange(longest, device=device)
    edges = torch.tensor(gaps, device=device)[:, None]
    mask = steps >= edges if side == "left" else steps < longest - edges
    return ids, mask.to(torch.int64)


@contextlib.contextmanager
def scoring(model: nn.Module) -> Iterator[None]:
    """Puts ``model`` into evaluation mode without gradients, and back."""
    import torch

    with evaluation_mode(model), torch.no_grad():
        yield
