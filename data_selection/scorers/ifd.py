"""Instruction-following difficulty: how little the instruction helps to predict the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from finetune.data_selection.base import Evidence, Measured, RowScorer, Score, ScorerConfig
from finetune.data_selection.registry import register

if TYPE_CHECKING:
    from finetune.data_selection.engine.rater import Rater
    from finetune.data_selection.engine.targets import Pair
    from finetune.data_selection.pool import Example

__all__ = ["Ifd", "IfdConfig", "ratio"]

Metric = Literal["ppl", "loss"]


class IfdConfig(ScorerConfig):
    """How the two losses are compared."""

    metric: Metric = Field(
        default="ppl",
        description="ppl: exp(loss given the instruction - loss alone); loss: the one divided by the other.",
    )
    misaligned: Literal["exclude", "keep"] = Field(
        default="exclude", description="What happens to rows that score 1 or more: the instruction does not help."
    )


@register("ifd")
class Ifd(RowScorer):
    """Scores rows by instruction-following difficulty: ``PPL(answer | instruction) / PPL(answer)``.

    The same answer tokens are scored on both sides, in float32, each token counted once; of a conversation with several
    turns every answer is scored after what was said before it. Rows at 1 or above are not kept: there the instruction
    does not help, so answer and instruction likely do not belong together. Among the others the highest are kept.
    Mismatched and garbled rows sit just below 1, and short answers score low: look at both ends in the report.

    References:
        Li et al., "From Quantity to Quality", arXiv 2308.12032, section 2.2; its code divides losses (``metric:
        loss``), later ones perplexities (``metric: ppl``).
    """

    paper: ClassVar[str] = "arXiv 2308.12032"
    Config: ClassVar[type[ScorerConfig]] = IfdConfig
    unmeasured: ClassVar[frozenset[str]] = frozenset({"metric", "misaligned"})
    config: IfdConfig

    def measure(self, rater: Rater, batch: Sequence[Example]) -> list[Measured]:
        """Returns ``loss`` given what was said before, ``loss_alone`` and the number of ``scored_tokens``."""
        from finetune.data_selection.engine.targets import measure_pairs

        return measure_pairs(rater, [self.pair(rater, example) for example in batch])

    def pair(self, rater: Rater, example: Example) -> Pair:
        """Returns the answers' tokens with and without what was said before them."""
        from finetune.data_selection.engine.targets import labelled_pair

        ends = {*rater.tokenizer.all_special_ids, *rater.tokenizer.added_tokens_decoder}
        return labelled_pair(example.encoded.input_ids, example.encoded.labels, rater.start, ends)

    def score(self, example: Example, *evidence: Evidence) -> Score:
        """Returns the ratio."""
        value = ratio(evidence[0], self.config.metric)
        excluded = value >= 1 and self.config.misaligned == "exclude"
        return Score(value, "the instruction does not help to predict the answer" if excluded else "")


def ratio(evidence: Evidence, metric: Metric) -> float:
    """Returns how the loss in context compares with the loss alone; 1 is no help, less is help."""
    given, alone = evidence["loss"], evidence["loss_alone"]
    if metric == "ppl":
        return math.exp(given - alone)
    return float(given / alone) if alone else math.inf
