"""SIFT mask: the entries with the largest gradient of each tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from finetune.methods.calibrated_entries import CalibratedEntries
from finetune.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Sift"]


@register("sift")
class Sift(CalibratedEntries):
    """Trains of each tensor the entries with the largest gradient on a sample of the training data.

    Each tensor gives the same share of its entries, by ``|dL/dw|`` of the sum over the calibration batches.

    References:
        Song et al., "Sparse is Enough in Fine-tuning Pre-trained Large Language Models", arXiv 2312.11875, section 4.
    """

    paper: ClassVar[str] = "arXiv 2312.11875"
    per_tensor: ClassVar[bool] = True

    def accumulate(self, total: Tensor, gradient: Tensor) -> None:
        """Adds the gradient."""
        total.add_(gradient)

    def score(self, total: Tensor, weight: Tensor) -> Tensor:
        """Returns the size of the gradient."""
        return total.abs()
