"""ID3: entries are unmasked step by step, by gradient and size."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from finetune.core.errors import CheckpointError
from finetune.core.learned_state import TRAINING
from finetune.methods.base import MethodConfig
from finetune.methods.registry import register
from finetune.methods.selected_entries import SelectedEntries, SelectedEntriesConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from finetune.methods.primitives.entry_pool import Observer

__all__ = ["ID3", "ID3Config"]

_STEP, _ARRIVAL = f"{TRAINING}step", f"{TRAINING}arrival"


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
class ID3(SelectedEntries):
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

    def _observer(self) -> Observer:
        from finetune.methods.primitives.unmasking import Unmasking, UnmaskingRule

        config = self.config
        rule = UnmaskingRule(config.exp, config.eps, config.schedule, config.select_every, config.accumulation)
        self._unmasking: Unmasking = Unmasking(rule)
        self._unmasking.total_steps = config.steps
        return self._unmasking

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        from finetune.methods.primitives.entry_age import EntryAge
        from finetune.methods.primitives.step_sync import before_optimizer_step

        model = super()._attach(model, candidates)
        self._unmasking.watch(self._pool)
        self._age: EntryAge | None = None
        if self.config.state == "per_entry":
            self._age = EntryAge(self._pool.values)
            self._before = before_optimizer_step([self._pool.values], self._age.remember)
        return model

    def bind(self, *, total_steps: int) -> None:
        """Spreads the budget over ``total_steps``, unless the config says over how many."""
        if self.config.steps is None:
            self._unmasking.total_steps = total_steps

    def _after_step(self, optimizer: Optimizer) -> None:
        self._unmasking.step += 1
        if self._age is not None:
            self._age.correct(optimizer, self._unmasking.step - self._unmasking.arrival.long())
        super()._after_step(optimizer)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what is unmasked, since when, and the step that the schedule is at."""
        import torch

        position = {_STEP: torch.tensor(self._unmasking.step), _ARRIVAL: self._unmasking.arrival}
        return {**super().state_dict(), **position}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores the unmasked entries and the position in the schedule; strict."""
        if missing := sorted({_STEP, _ARRIVAL} - state.keys()):
            raise CheckpointError("the learned state has no position in the schedule", where=", ".join(missing))
        super().load_state_dict(state)
        self._unmasking.step = int(state[_STEP])
        self._unmasking.arrival.copy_(state[_ARRIVAL])

    def merge(self) -> nn.Module:
        """Makes the modules plain again; their weights hold the trained entries already."""
        if self._age is not None:
            self._before.remove()
        return super().merge()

    def _chosen(self) -> tuple[str, ...]:
        steps = self._unmasking.total_steps
        over = "the run" if steps is None else f"{steps:,} steps"
        schedule = f"{self._pool.chosen:,} unmasked now, {self.config.schedule} schedule over {over}"
        return (super()._chosen()[0], schedule)
