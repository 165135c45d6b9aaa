"""FISH mask: the entries with the largest Fisher information."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from finetune.methods.amounts import Amount
from finetune.methods.base import MethodConfig
from finetune.methods.calibrated_entries import CalibratedEntries, CalibratedEntriesConfig
from finetune.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Fish", "FishConfig"]


class FishConfig(CalibratedEntriesConfig):
    """What a FISH mask trains."""

    calibration: Amount = Field(
        default=1024, description="Training examples to choose by: their number (1024) or a share of them (0.01)."
    )


@register("fish")
class Fish(CalibratedEntries):
    """Trains the entries with the largest empirical Fisher information on a sample of the training data.

    ``F = sum over examples of (dL/dw)^2``, one backward pass per example: the square of a batch's mean gradient is
    something else. The ``budget`` largest of all tensors together train.

    References:
        Sung et al., "Training Neural Networks with Fixed Sparse Masks", arXiv 2111.09839, equation 6.
    """

    paper: ClassVar[str] = "arXiv 2111.09839"
    Config: ClassVar[type[MethodConfig]] = FishConfig
    per_example: ClassVar[bool] = True

    def accumulate(self, total: Tensor, gradient: Tensor) -> None:
        """Adds the squares."""
        total.addcmul_(gradient.float(), gradient.float())

    def score(self, total: Tensor, weight: Tensor) -> Tensor:
        """Returns the Fisher information."""
        return total
