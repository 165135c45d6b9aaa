"""A random mask: entries chosen without looking, the baseline that other masks have to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from finetune.methods.base import MethodConfig
from finetune.methods.registry import register
from finetune.methods.selected_entries import SelectedEntries, SelectedEntriesConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["RandomEntries", "RandomEntriesConfig"]


class RandomEntriesConfig(SelectedEntriesConfig):
    """What a random mask trains."""

    seed: int = Field(default=0, description="Seed of the choice.")


@register("random")
class RandomEntries(SelectedEntries):
    """Trains entries drawn uniformly from the scope: needs no data and is hard to beat.

    Exactly ``budget`` distinct entries over all tensors together, the same for the same seed on every process.

    References:
        Xu and Zhang, "Random Masking Finds Winning Tickets for Parameter Efficient Fine-tuning", arXiv 2405.02596;
        Rios et al., "Sparsity May Be All You Need: Sparse Random Parameter Adaptation", arXiv 2502.15975.
    """

    paper: ClassVar[str] = "arXiv 2405.02596"
    Config: ClassVar[type[MethodConfig]] = RandomEntriesConfig
    config: RandomEntriesConfig

    def choose(self, scope: dict[str, nn.Parameter], budget: int) -> dict[str, Tensor]:
        """Draws the entries."""
        import torch

        from finetune.methods.primitives.entry_choice import random_entries

        generator = torch.Generator().manual_seed(self.config.seed)
        return random_entries({name: weight.numel() for name, weight in scope.items()}, budget, generator)
