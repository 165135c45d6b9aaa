"""Rows that say the same: planted copies are found, others are not, and the best of each cluster is kept."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from finetune.data_selection.base import Score
from finetune.data_selection.choice.duplicates import (
    DuplicateFilter,
    bands,
    exact_clusters,
    near_clusters,
    normalized_text,
    shingles,
)
from finetune.data_selection.choice.rules import Candidate, Limits, choose
from support.pools import examples
from support.tiny import tiny_tokenizer

ALPACA = Path(__file__).parents[3] / "shared" / "data" / "alpaca_random" / "train.jsonl"


def jaccard(one: str, other: str) -> float:
    return len(shingles(one) & shingles(other)) / len(shingles(one) | shingles(other))


def brute_force(texts: list[str], threshold: float) -> list[int]:
    """Clusters by comparing every pair, merged until nothing changes."""
    clusters = [{position} for position in range(len(texts))]
    for one, other in itertools.combinations(range(len(texts)), 2):
        if jaccard(texts[one], texts[other]) >= threshold:
            merged = clusters[one] | clusters[other]
            for position in merged:
                clusters[position] = merged
    return [min(cluster) for cluster in clusters]


def test_shingles_are_words_or_else_letters() -> None:
    assert shingles("a b c d e f") == {"a b c d e", "b c d e f"}
    assert shingles("東京の天気は") == {"東京の天気", "京の天気は"}
    assert shingles("hi") == {"hi"}


def test_rows_that_differ_in_case_width_and_space_are_the_same() -> None:
    rows = [("What is  IT?", "Ａn answer."), ("what is it?", "an\nanswer."), ("what is it?", "another")]
    texts = [normalized_text(example) for example in examples(tiny_tokenizer(), rows)]
    assert exact_clusters(texts) == [0, 0, 2]


def planted() -> list[str]:
    """Sixty texts of forty words, and for each third one a copy with two words changed."""
    generator = random.Random(3)
    words = [f"word{number}" for number in range(400)]
    texts = [generator.choices(words, k=40) for _ in range(60)]
    for text in texts[::3]:
        copy = list(text)
        copy[0] = copy[-1] = "changed"
        texts.append(copy)
    return [" ".join(text) for text in texts]


def test_planted_copies_are_found_whatever_the_order_and_nothing_else() -> None:
    texts = planted()
    found = near_clusters(texts, 0.8)
    assert found == brute_force(texts, 0.8)
    assert found[60:] == list(range(0, 60, 3))
    order = list(range(len(texts)))
    random.Random(0).shuffle(order)
    shuffled = near_clusters([texts[place] for place in order], 0.8)
    groups = {frozenset(order[i] for i, name in enumerate(shuffled) if name == cluster) for cluster in shuffled}
    assert groups == {frozenset(i for i, name in enumerate(found) if name == cluster) for cluster in found}


@pytest.mark.parametrize(
    ("threshold", "words", "expected"), [(0.8, 13, (16, 8, 0.947)), (0.6, 8, (32, 4, 0.988)), (0.5, 7, (42, 3, 0.996))]
)
def test_pairs_at_the_threshold_are_found_as_often_as_the_formula_says(
    threshold: float, words: int, expected: tuple[int, int, float]
) -> None:
    count, length = bands(threshold)
    share = 1 - (1 - threshold**length) ** count
    assert (count, length, round(share, 3)) == expected
    # Texts of m shingles that differ in their last word have (m - 1) / (m + 1) of them in common.
    pairs, texts = 600, []
    for number in range(pairs):
        text = [f"{number}-{place}" for place in range(words)]
        texts += [" ".join(text), " ".join([*text[:-1], "changed"])]
    assert jaccard(*texts[:2]) == pytest.approx(threshold)
    clusters = near_clusters(texts, threshold)
    found = sum(clusters[2 * number + 1] == 2 * number for number in range(pairs)) / pairs
    assert found == pytest.approx(share, abs=3 * (share * (1 - share) / pairs) ** 0.5)
    assert all(cluster in (place, place - place % 2) for place, cluster in enumerate(clusters))


@pytest.mark.parametrize("threshold", [0.01, 0.3, 0.95, 1.0])
def test_any_threshold_has_bands(threshold: float) -> None:
    text = " ".join(f"word{place}" for place in range(30))
    assert near_clusters([text, text, "something else altogether, which is not alike"], threshold) == [0, 0, 2]


@pytest.mark.skipif(not ALPACA.is_file(), reason="needs ../shared/data")
def test_real_rows_are_those_of_brute_force() -> None:
    rows = [json.loads(line) for line in ALPACA.read_text(encoding="utf-8").splitlines()[:150]]
    texts = [f"{row['instruction']} {row['output']}".lower() for row in rows]
    texts += [text + " indeed" for text in texts[:30] if len(text.split()) > 30]
    assert near_clusters(texts, 0.8) == brute_force(texts, 0.8)


def test_the_row_that_ranks_highest_is_kept() -> None:
    rows = [Candidate(place, str(place), Score(value), 1, "a") for place, value in enumerate((1, 3, 2))]
    chosen, left_out = choose(rows, Limits(top=3), direction="highest", rules=[DuplicateFilter([0, 0, 2])])
    assert (chosen, left_out) == ([1, 2], {0: "the same as a row that ranks higher"})
