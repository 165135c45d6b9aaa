"""SNIP mask: the entries whose removal would change the loss most."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from finetune.methods.calibrated_entries import CalibratedEntries
from finetune.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Snip"]


@register("snip")
class Snip(CalibratedEntries):
    """Trains the entries with the largest ``|w dL/dw|`` on a sample of the training data.

    The gradient is the sum over the calibration batches; the ``budget`` largest of all tensors together train.

    References:
        Lee et al., "SNIP: Single-shot Network Pruning based on Connection Sensitivity", arXiv 1810.02340, equation 6.
    """

    paper: ClassVar[str] = "arXiv 1810.02340"

    def accumulate(self, total: Tensor, gradient: Tensor) -> None:
        """Adds the gradient."""
        total.add_(gradient)

    def score(self, total: Tensor, weight: Tensor) -> Tensor:
        """Returns the connection sensitivity."""
        return (total * weight.float()).abs_()
