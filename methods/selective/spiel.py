"""SpIEL: a sparse change that is pruned and regrown while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from finetune.methods.base import MethodConfig
from finetune.methods.registry import register
from finetune.methods.scheduled_entries import ScheduledEntries
from finetune.methods.selected_entries import SelectedEntriesConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from finetune.methods.primitives.entry_schedule import EntrySchedule

__all__ = ["SpIEL", "SpIELConfig"]


class SpIELConfig(SelectedEntriesConfig):
    """How SpIEL prunes and regrows."""

    every: int = Field(default=20, ge=1, description="Optimizer steps between two replacements.")
    gradient_steps: int = Field(
        default=5, ge=1, description="Steps before a replacement over which the gradients of candidates are gathered."
    )
    rate: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="Share of the entries that is replaced, falling linearly to zero; the first replaces all.",
    )
    seed: int = Field(default=0, description="Seed of the entries that train first.")


@register("spiel")
class SpIEL(ScheduledEntries):
    """Trains a fixed number of entries of each tensor and exchanges those that changed least for better ones.

    Every ``every`` steps the entries with the smallest ``|w - base|`` go back to their base value, and as many with the
    largest gathered ``|gradient|`` take their place, starting at their base value with seeded Adam moments. Steps that
    gather form the dense gradient of one layer at a time, the others only the entries'.

    References:
        Ansell et al., "Scaling Sparse Fine-Tuning to Large Language Models", arXiv 2401.16405, section 3.2 (SpIEL-AG).
    """

    paper: ClassVar[str] = "arXiv 2401.16405"
    Config: ClassVar[type[MethodConfig]] = SpIELConfig
    config: SpIELConfig

    def choose(self, scope: dict[str, nn.Parameter], budget: int) -> dict[str, Tensor]:
        """Draws the first entries of each tensor at random."""
        import torch

        from finetune.methods.primitives.entry_choice import even_quotas, random_entries

        generator = torch.Generator().manual_seed(self.config.seed)
        sizes = {name: weight.numel() for name, weight in scope.items()}
        quotas = even_quotas(sizes, budget)
        return {name: random_entries({name: sizes[name]}, quotas[name], generator)[name] for name in scope}

    def _make_schedule(self) -> EntrySchedule:
        from finetune.methods.primitives.regrowing import Regrowing, RegrowingRule

        config = self.config
        return Regrowing(RegrowingRule(config.every, min(config.gradient_steps, config.every), config.rate))

    def _chosen(self) -> tuple[str, ...]:
        config = self.config
        return (
            *super()._chosen(),
            f"every {config.every} steps {config.rate:.0%} of them are exchanged, at first all, at last none",
        )
