"""Base of the methods that choose entries by gradients on a few training examples."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from finetune.methods.amounts import Amount, count_of
from finetune.methods.base import MethodConfig
from finetune.methods.selected_entries import SelectedEntries, SelectedEntriesConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["CalibratedEntries", "CalibratedEntriesConfig"]


class CalibratedEntriesConfig(SelectedEntriesConfig):
    """What methods that choose by gradients share."""

    calibration: Amount = Field(
        default=64, description="Training examples to choose by: their number (64) or a share of them (0.01)."
    )
    passes: int = Field(
        default=1,
        ge=1,
        description="Times that these examples are gone through, each for a part of the scope: the float32 accumulator "
        "is so many times smaller.",
    )


class CalibratedEntries(SelectedEntries):
    """Accumulates something of each entry's gradient over the calibration examples, then ranks.

    Memory while choosing: 4 bytes per entry of the scope over :attr:`CalibratedEntriesConfig.passes`, and one dense
    gradient.

    Attributes:
        per_example: Whether the gradient is that of single examples; else that of whole batches.
        per_tensor: Whether each tensor gives the same share of its entries; else the best of all tensors train.
    """

    Config: ClassVar[type[MethodConfig]] = CalibratedEntriesConfig
    config: CalibratedEntriesConfig
    per_example: ClassVar[bool] = False
    per_tensor: ClassVar[bool] = False

    @abstractmethod
    def accumulate(self, total: Tensor, gradient: Tensor) -> None:
        """Adds what counts of ``gradient`` to ``total``, in place; both have the weight's shape, ``total`` float32."""

    @abstractmethod
    def score(self, total: Tensor, weight: Tensor) -> Tensor:
        """Returns the score of each entry, float32, of the weight's shape; the highest train."""

    def calibration_examples(self, total: int) -> int:
        """Returns how many examples to look at."""
        return count_of(self.config.calibration, total)

    def choose(self, scope: dict[str, nn.Parameter], budget: int) -> dict[str, Tensor]:
        """Ranks the entries by their scores."""
        from finetune.methods.primitives.entry_choice import even_quotas, top_overall, top_per_tensor

        sizes = {name: weight.numel() for name, weight in scope.items()}
        scores = (
            (name, self.score(total, scope[name].detach()).reshape(-1))
            for part in _parts(scope, self.config.passes)
            for name, total in self._totals(part).items()
        )
        if self.per_tensor:
            return top_per_tensor(scores, even_quotas(sizes, budget))
        return top_overall(scores, sizes, budget)

    def _totals(self, part: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        import torch

        from finetune.methods.primitives.calibration import single_examples, watch_gradients

        assert self._calibration is not None
        totals = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in part.items()}
        batches = single_examples(self._calibration) if self.per_example else self._calibration
        watch_gradients(self._calibrated, part, batches, lambda name, gradient: self.accumulate(totals[name], gradient))
        return totals

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        self._calibrated = model
        try:
            return super()._attach(model, candidates)
        finally:
            del self._calibrated


def _parts(scope: dict[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """Returns the scope cut into at most ``count`` parts of about equal size."""
    whole, before = sum(weight.numel() for weight in scope.values()), 0
    parts: list[dict[str, nn.Parameter]] = [{} for _ in range(count)]
    for name, weight in scope.items():
        parts[before * count // whole][name] = weight
        before += weight.numel()
    return [part for part in parts if part]
