"""ID3: entries are unmasked step by step, by gradient and size."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from finetune.methods.base import MethodConfig
from finetune.methods.registry import register
from finetune.methods.scheduled_entries import ScheduledEntries
from finetune.methods.selected_entries import SelectedEntriesConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from finetune.methods.primitives.entry_schedule import EntrySchedule

__all__ = ["ID3", "ID3Config"]


class ID3Config(SelectedEntriesConfig):
    """What ID3 unmasks, and when."""

    exp: float = Field(
        default=1.0,
        description="Exponent e of the score |g| / (|w| + eps)^e: 0 goes by the gradient alone, above 0 favours small "
        "weights, below 0 large ones.",
    )
    eps: float = Field(default=0.1, gt=0, description="Keeps the score of small weights finite.")
    schedule: Literal["uniform", "frontload"] = Field(
        default="uniform", description="uniform spreads the budget evenly; frontload gives the remainder to the first."
    )
    steps: int | None = Field(
        default=None, ge=1, description="Optimizer steps over which the budget is unmasked; null: all of the run."
    )
    select_every: int = Field(
        default=1, ge=1, description="Steps whose quotas are unmasked together; others need no dense gradient."
    )
    state: Literal["per_entry", "global"] = Field(
        default="per_entry",
        description="Whose age Adam's bias correction goes by: that of each entry, or that of the run as in the paper.",
    )
    accumulation: Literal["exact", "last", "candidates"] = Field(
        default="candidates",
        description="What the score sees of several micro-batches: their sum for the best entries of the first, their "
        "whole sum (exact: a dense accumulator), or the last one.",
    )


@register("id3")
class ID3(ScheduledEntries):
    """Unmasks entries step by step, those of largest ``|g| / (|w| + eps)^e``, and trains them from then on.

    At optimizer step t the ``u_t`` best of the entries that are still masked join, over all tensors of the scope; the
    ``u_t`` add up to the budget. A new entry takes part in the same step. Steps that unmask form the dense gradient of
    one layer at a time, the others only the entries'. Works on an adapter's matrices too: ``[lora, id3]``.

    Differences from the authors' code: the budget is kept exactly, memory is O(budget) instead of masks and optimizer
    states of the size of the model, weight decay moves nothing that is masked, the schedule is in the checkpoint, and
    Adam's bias correction goes by the age of each entry (``state: global`` is the paper's).

    References:
        Agarwal et al., "Step-by-Step Unmasking for Parameter-Efficient Fine-tuning of Large Language Models",
        arXiv 2408.14470, section 3 (the D3 score is equation 3).
    """

    paper: ClassVar[str] = "arXiv 2408.14470"
    Config: ClassVar[type[MethodConfig]] = ID3Config
    config: ID3Config

    def choose(self, scope: dict[str, nn.Parameter], budget: int) -> dict[str, Tensor]:
        """Returns nothing: the first step chooses."""
        return {}

    def _make_schedule(self) -> EntrySchedule:
        from finetune.methods.primitives.unmasking import Unmasking, UnmaskingRule

        config = self.config
        rule = UnmaskingRule(config.exp, config.eps, config.schedule, config.select_every, config.accumulation)
        unmasking = Unmasking(rule)
        unmasking.total_steps = config.steps
        return unmasking

    def _ages_per_entry(self) -> bool:
        return self.config.state == "per_entry"

    def bind(self, *, total_steps: int) -> None:
        """Spreads the budget over ``total_steps``, unless the config says over how many."""
        super().bind(total_steps=self.config.steps or total_steps)

    def _chosen(self) -> tuple[str, ...]:
        steps = self._schedule.total_steps
        over = "the run" if steps is None else f"{steps:,} steps"
        schedule = f"{self._pool.chosen:,} unmasked now, {self.config.schedule} schedule over {over}"
        return (super()._chosen()[0], schedule)
