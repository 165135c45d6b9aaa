"""Rows compared with each other: vectors, coverage, likeness to a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.core.errors import ConfigError
from finetune.data_selection import build_scorer
from finetune.data_selection.choice.diversity import SimilarityFilter, farthest_first, lazy_greedy, round_robin
from finetune.data_selection.engine.embeddings import embed, packed, position_weighted_mean, unpacked
from finetune.data_selection.engine.rater import Rater
from support.pools import PAIRS, examples
from support.tiny import tiny_llama, tiny_tokenizer


@pytest.fixture(scope="module")
def rater() -> Rater:
    return Rater(tiny_llama(), tiny_tokenizer())


def points(*values: float) -> Any:
    return np.array(values, dtype=np.float32)[:, None]


class TestVectors:
    def test_later_tokens_count_more(self) -> None:
        found = position_weighted_mean(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        assert found.tolist() == pytest.approx([0.624695, 0.780869], abs=1e-6)

    def test_padding_does_not_count(self, rater: Rater) -> None:
        rows = [list(range(5, 5 + length)) for length in (3, 20, 1)]
        for row, vector in zip(rows, embed(rater, rows), strict=True):
            with torch.no_grad():
                hidden = rater.model.model(input_ids=torch.tensor([row])).last_hidden_state[0]
            mean = sum((t + 1) * state for t, state in enumerate(hidden)) / sum(range(1, len(row) + 1))
            np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)

    def test_are_stored_exactly(self) -> None:
        vectors = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
        np.testing.assert_array_equal(unpacked([packed(vector) for vector in vectors]), vectors)


class TestFarthestFirst:
    def test_distances_are_updated_after_every_pick(self) -> None:
        assert farthest_first(points(0, 1, 5, 6, 10))[:3] == [0, 4, 2]

    def test_is_brute_force_greedy(self) -> None:
        vectors = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
        order = [0]
        while len(order) < 50:
            left = [place for place in range(50) if place not in order]
            order.append(max(left, key=lambda place: min(np.linalg.norm(vectors[place] - vectors[at]) for at in order)))
        assert farthest_first(vectors) == order


class TestFacilityLocation:
    def test_the_worked_example(self) -> None:
        places = np.array([0, 1, 5, 6, 10])
        similarity = 1 - np.abs(places[:, None] - places) / 10
        order = lazy_greedy(5, lambda place: similarity[place], least=0.0)
        assert order[:2] == [2, 0]  # 5, then 0
        assert similarity[:, order[:2]].max(1).sum() == pytest.approx(4.3)

    def test_is_naive_greedy_and_never_falls(self) -> None:
        vectors = np.random.default_rng(3).normal(size=(40, 4))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        similarity = vectors @ vectors.T
        order = lazy_greedy(40, lambda place: similarity[place], least=-1.0)
        values = []
        for picked, place in enumerate(order):
            covered = {other: similarity[:, [*order[:picked], other]].max(1).sum() for other in order[picked:]}
            # Two rows that are nearest to each other add the same, and rounding decides between them.
            assert covered[place] >= max(covered.values()) - 1e-9
            values.append(covered[place])
        assert values == sorted(values)

    def test_ranks_a_pool_whatever_its_order(self, rater: Rater) -> None:
        scorer = build_scorer({"name": "facility_location"})
        by_key = []
        for rows in (PAIRS, PAIRS[::-1]):
            pool = examples(rater.tokenizer, rows)
            evidence: Any = [[row] for row in scorer.measure(rater, pool)]
            scores = scorer.score_pool(pool, evidence)
            by_key.append({example.key: score.value for example, score in zip(pool, scores, strict=True)})
        assert by_key[0] == by_key[1]
        assert sorted(by_key[0].values()) == pytest.approx([(place + 1) / len(PAIRS) for place in range(len(PAIRS))])


def test_queries_take_turns() -> None:
    similarity = np.array([[0.9, 0.8], [0.8, 0.9], [0.7, 0.95], [0.1, 0.2]], dtype=np.float32)
    assert round_robin(similarity) == [0, 2, 1, 3]


def test_a_row_close_to_any_chosen_one_is_refused() -> None:
    angles = np.radians([0, 5, 40, 44])
    rule = SimilarityFilter(np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32), 0.99)
    refused = []
    for position in range(4):
        refused.append(bool(rule.refuses(position)))
        if not refused[-1]:
            rule.take(position)
    assert refused == [False, True, False, True]


def scores(scorer: Any, rater: Rater, pool: Any) -> list[float]:
    scorer.check(pool, rater.tokenizer)
    scorer.begin(rater, pool)
    evidence = [[row] for row in scorer.measure(rater, pool)]
    return [score.value for score in scorer.score_pool(pool, evidence)]


def test_k_center_ranks_all_rows_whatever_their_order(rater: Rater) -> None:
    pool = examples(rater.tokenizer)
    found = dict(
        zip((example.key for example in pool), scores(build_scorer({"name": "k_center"}), rater, pool), strict=True)
    )
    assert sorted(found.values()) == pytest.approx([place / len(pool) for place in range(1, len(pool) + 1)])
    turned = pool[::-1]
    again = scores(build_scorer({"name": "k_center"}), rater, turned)
    assert dict(zip((example.key for example in turned), again, strict=True)) == found


class TestRdsPlus:
    def test_rows_of_the_target_are_the_likest(self, rater: Rater, tmp_path: Path) -> None:
        target = tmp_path / "target.jsonl"
        rows = [{"prompt": asked, "completion": said} for asked, said in (PAIRS[2], PAIRS[5])]
        target.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = scores(build_scorer({"name": "rds_plus", "target": str(target)}), rater, examples(rater.tokenizer))
        assert sorted(range(len(found)), key=lambda place: -found[place])[:2] == [2, 5]

    def test_without_a_target_it_says_so(self, rater: Rater) -> None:
        with pytest.raises(ConfigError) as caught:
            build_scorer({"name": "rds_plus"}).check(examples(rater.tokenizer), rater.tokenizer)
        assert caught.value.where == "select.scorer.target"

    def test_another_target_under_the_same_name_is_another_measurement(self, tmp_path: Path) -> None:
        target = tmp_path / "target.jsonl"
        prints = []
        for text in ("a", "b"):
            target.write_text(text)
            prints.append(build_scorer({"name": "rds_plus", "target": str(target)}).fingerprint())
        assert prints[0] != prints[1]
