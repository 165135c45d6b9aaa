"""Which rows are kept, by hand-worked pools."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.core.errors import DataError
from finetune.data_selection.base import Score
from finetune.data_selection.choice.diversity import SimilarityFilter
from finetune.data_selection.choice.duplicates import DuplicateFilter
from finetune.data_selection.choice.quotas import balanced_quotas, proportional_quotas
from finetune.data_selection.choice.rules import Candidate, Limits, choose, rank


def pool(*values: float, sources: str = "", tokens: int = 10) -> list[Candidate]:
    """Candidates with keys in reverse of their order, so that a tie shows."""
    names = sources or "a" * len(values)
    return [
        Candidate(place, f"{len(values) - place:03d}", Score(value), tokens, names[place])
        for place, value in enumerate(values)
    ]


def test_ranks_from_either_end_or_outward_from_the_middle() -> None:
    candidates = pool(3, 1, 5, 2, 4)
    assert [one.score.value for one in rank(candidates, "highest")] == [5, 4, 3, 2, 1]
    assert [one.score.value for one in rank(candidates, "lowest")] == [1, 2, 3, 4, 5]
    assert [one.score.value for one in rank(candidates, "middle")] == [3, 2, 4, 1, 5]
    assert [one.score.value for one in rank(pool(1, 2, 3, 4), "middle")] == [2, 3, 1, 4]


def test_ties_go_by_key_and_not_by_place() -> None:
    for direction in ("highest", "lowest"):
        assert [one.key for one in rank(pool(7, 7, 7), direction)] == ["001", "002", "003"]


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (Limits(top=2), [2, 4]),
        (Limits(top=99), [2, 4, 0, 3, 1]),
        (Limits(fraction=0.4), [2, 4]),
        (Limits(fraction=0.59), [2, 4]),
        (Limits(fraction=0.6), [2, 4, 0]),  # 0.6 * 5 is 3, though floats say a little less
        (Limits(fraction=0.01), [2]),
        (Limits(fraction=1.0), [2, 4, 0, 3, 1]),
        (Limits(threshold=3), [2, 4, 0]),
        (Limits(threshold=3, top=1), [2]),
        (Limits(budget=25), [2, 4]),
    ],
)
def test_how_many(limits: Limits, kept: list[int]) -> None:
    chosen, left_out = choose(pool(3, 1, 5, 2, 4), limits, direction="highest")
    assert chosen == kept
    assert set(left_out) == set(range(5)) - set(kept)


def test_a_threshold_is_an_upper_bound_where_the_lowest_are_kept() -> None:
    assert choose(pool(3, 1, 5), Limits(threshold=3), direction="lowest")[0] == [1, 0]


def test_a_budget_passes_over_a_row_that_is_too_long() -> None:
    rows = [Candidate(place, str(place), Score(-place), size, "a") for place, size in enumerate((6, 7, 4))]
    chosen, left_out = choose(rows, Limits(budget=10), direction="highest")
    assert (chosen, left_out) == ([0, 2], {1: "over the budget of tokens"})


def test_an_excluded_row_is_not_kept_whatever_it_scores() -> None:
    rows = [*pool(1, 2), Candidate(2, "x", Score(9, "misaligned"), 10, "a")]
    assert choose(rows, Limits(top=3), direction="highest") == ([1, 0], {2: "misaligned"})


def test_quotas_of_the_sources() -> None:
    assert balanced_quotas({"a": 2, "b": 10, "c": 10}, 9) == {"a": 2, "b": 4, "c": 3}
    assert balanced_quotas({"a": 3, "b": 3}, 100) == {"a": 3, "b": 3}
    assert balanced_quotas({"a": 5, "b": 5, "c": 5}, 2) == {"a": 1, "b": 1, "c": 0}
    assert proportional_quotas({"a": 70, "b": 20, "c": 10}, 10) == {"a": 7, "b": 2, "c": 1}
    assert proportional_quotas({"a": 1, "b": 1, "c": 1}, 4) == {"a": 2, "b": 1, "c": 1}


def test_every_source_gives_its_best() -> None:
    rows = pool(9, 8, 7, 6, 1, 2, sources="aaaabb")
    assert choose(rows, Limits(top=4, per_source="equal"), direction="highest")[0] == [0, 1, 5, 4]
    assert choose(rows, Limits(top=3, per_source="proportional"), direction="highest")[0] == [0, 1, 5]


def test_what_is_refused_makes_room_for_the_next() -> None:
    rules = [DuplicateFilter([0, 0, 2])]
    chosen, left_out = choose(pool(3, 2, 1), Limits(top=2), direction="highest", rules=rules)
    assert (chosen, left_out) == ([0, 2], {1: "the same as a row that ranks higher"})


@pytest.mark.parametrize("order", [1, -1])
def test_a_row_that_one_rule_refuses_does_not_count_for_another(order: int) -> None:
    # 1 says the same as 2; it is too close to 0, and 2 is not.
    vectors = np.array([[1, 0], [1, 0], [0, 1]], dtype=np.float32)
    rules = [DuplicateFilter([0, 1, 1]), SimilarityFilter(vectors, 0.9)][::order]
    chosen, left_out = choose(pool(3, 2, 1), Limits(top=3), direction="highest", rules=rules)
    assert (chosen, left_out) == ([0, 2], {1: "too similar to a row that ranks higher"})


def test_nothing_kept_is_an_error_with_the_reasons() -> None:
    with pytest.raises(DataError, match="no row is kept") as caught:
        choose(pool(1, 2), Limits(threshold=5), direction="highest")
    assert "beyond the threshold" in caught.value.got
