"""By coverage: rows that lie far from each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from finetune.data_selection.base import Evidence, Measured, Measuring, Score, Scorer
from finetune.data_selection.registry import register

if TYPE_CHECKING:
    from finetune.data_selection.engine.rater import Rater
    from finetune.data_selection.pool import Example

__all__ = ["Embeddings", "KCenter"]


class Embeddings(Measuring):
    """Measures the vector of every row; what scorers and rules that compare rows are made of."""

    name: ClassVar[str] = "embeddings"
    needs_answers: ClassVar[bool] = False

    def measure(self, rater: Rater, batch: Sequence[Example]) -> list[Measured]:
        """Returns ``vector``: the position-weighted mean of the final hidden states, at unit length."""
        from finetune.data_selection.engine.embeddings import embed, packed

        vectors = embed(rater, [example.encoded.input_ids for example in batch])
        return [{"vector": packed(vector)} for vector in vectors]


@register("k_center")
class KCenter(Embeddings, Scorer):
    """Ranks rows so that any number of the first covers the pool: each is the farthest from those before it.

    The score is one minus the share of the rows that rank before, so ``top: k`` is the greedy solution of the k-center
    problem, whose radius is at most twice the best. The first row is that with the lowest content key, so the order of
    the file does not matter.

    References:
        Sener and Savarese, "Active Learning for Convolutional Neural Networks: A Core-Set Approach", arXiv 1708.00489,
        algorithm 1.
    """

    paper: ClassVar[str] = "arXiv 1708.00489"
    unlisted: ClassVar[frozenset[str]] = frozenset({"vector"})

    def score_pool(self, pool: Sequence[Example], evidence: Sequence[Sequence[Evidence]]) -> list[Score]:
        """Returns scores that fall with the rank."""
        from finetune.data_selection.choice.diversity import farthest_first
        from finetune.data_selection.engine.embeddings import unpacked

        by_key = sorted(range(len(pool)), key=lambda position: pool[position].key)
        order = farthest_first(unpacked([evidence[position][0]["vector"] for position in by_key]))
        return scores_of_order([by_key[place] for place in order])


def scores_of_order(order: Sequence[int]) -> list[Score]:
    """Returns for each position the share of the rows that do not rank before it."""
    scores = [Score(0.0)] * len(order)
    for rank, position in enumerate(order):
        scores[position] = Score(1 - rank / len(order))
    return scores
