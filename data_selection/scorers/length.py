"""By length: the longest answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from finetune.data_selection.base import Evidence, RowScorer, Score
from finetune.data_selection.registry import register

if TYPE_CHECKING:
    from finetune.data_selection.pool import Example

__all__ = ["Length"]


@register("length")
class Length(RowScorer):
    """Scores rows by the tokens of their answers; the longest thousand are a strong baseline on small clean pools.

    On large mixed pools it collapses (arXiv 2503.01807): cap the length and remove duplicates first.

    References:
        Zhao et al., "Long Is More for Alignment", arXiv 2402.04833, section 2.
    """

    paper: ClassVar[str] = "arXiv 2402.04833"
    needs_answers: ClassVar[bool] = False

    def models(self, default: str) -> list[str]:
        """Needs none."""
        return []

    def score(self, example: Example, *evidence: Evidence) -> Score:
        """Returns the number of tokens."""
        return Score(float(example.answer_tokens))
