"""By what a row adds to those before it: every row of the pool is to have one like it among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from finetune.data_selection.base import Evidence, Score, Scorer
from finetune.data_selection.registry import register
from finetune.data_selection.scorers.k_center import Embeddings, scores_of_order

if TYPE_CHECKING:
    from finetune.data_selection.pool import Example

__all__ = ["FacilityLocation"]


@register("facility_location")
class FacilityLocation(Embeddings, Scorer):
    """Ranks rows so that the first ones stand for the whole pool: each adds most to the likeness of all rows to them.

    The rows S that rank first have, greedily, the largest sum over all rows of the cosine to the most similar one in
    S, at least 63 % of the best possible sum. Unlike ``k_center`` it prefers the middle of groups to their edges. It
    ranks by coverage alone, so it is for a pool that another scorer has cut already: Superfiltering takes 2 % of the
    pool out of its best 20 % so. The score is one minus the share of the rows that rank before; of equal rows the one
    with the lower content key ranks first.

    References:
        Li et al., "Superfiltering", arXiv 2402.00530, section 4.3; Minoux, "Accelerated greedy algorithms for
        maximizing submodular set functions", 1978.
    """

    paper: ClassVar[str] = "arXiv 2402.00530"
    unlisted: ClassVar[frozenset[str]] = frozenset({"vector"})

    def score_pool(self, pool: Sequence[Example], evidence: Sequence[Sequence[Evidence]]) -> list[Score]:
        """Returns scores that fall with the rank."""
        from finetune.data_selection.choice.diversity import lazy_greedy
        from finetune.data_selection.engine.embeddings import unpacked

        by_key = sorted(range(len(pool)), key=lambda position: pool[position].key)
        vectors_ND = unpacked([evidence[position][0]["vector"] for position in by_key])
        order = lazy_greedy(len(pool), lambda place: vectors_ND @ vectors_ND[place], least=-1.0)
        return scores_of_order([by_key[place] for place in order])
