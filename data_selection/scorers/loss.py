"""By the loss of the answers, or its exponential."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from finetune.data_selection.base import Direction, Evidence, Measured, RowScorer, Score
from finetune.data_selection.registry import register

if TYPE_CHECKING:
    from finetune.data_selection.engine.rater import Rater
    from finetune.data_selection.pool import Example

__all__ = ["AnswerLoss", "Perplexity"]


@register("loss")
class AnswerLoss(RowScorer):
    """Scores rows by the mean loss of the tokens that training would learn, in nats.

    The rows of highest loss are the worst choice in every comparison (arXiv 2503.01807), those in the middle are near
    chance: by default the middle is kept.
    """

    direction: ClassVar[Direction] = "middle"
    needs_answers: ClassVar[bool] = False

    def measure(self, rater: Rater, batch: Sequence[Example]) -> list[Measured]:
        """Returns ``loss``, and ``scored_tokens`` that it is the mean of."""
        from finetune.data_selection.engine.rater import TargetRow

        losses = rater.losses([TargetRow(example.encoded.input_ids, example.encoded.labels) for example in batch])
        return [{"loss": loss.total / loss.tokens, "scored_tokens": loss.tokens} for loss in losses]

    def score(self, example: Example, *evidence: Evidence) -> Score:
        """Returns the loss."""
        return Score(evidence[0]["loss"])


@register("perplexity")
class Perplexity(AnswerLoss):
    """Scores rows by the perplexity of their answers: the exponential of ``loss``, so the same ranking."""

    def score(self, example: Example, *evidence: Evidence) -> Score:
        """Returns the perplexity."""
        return Score(math.exp(evidence[0]["loss"]))
