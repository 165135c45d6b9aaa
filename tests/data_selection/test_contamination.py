"""Rows that are in the evaluation data, by hand and on a training set that is known to hold test questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.data_selection.choice.contamination import Contamination, texts_in

DATA = Path(__file__).parents[3] / "shared" / "data"
QUESTION = "How many apples does Ann have left if she buys twelve and eats a third of them on Monday?"


def test_a_run_of_words_counts_whatever_its_case_and_punctuation() -> None:
    known = Contamination([QUESTION], 13)
    assert known([f"Solve this: {QUESTION.upper().replace(',', ';')} Thanks!"]) == (
        "shares 13 words in a row with an evaluation text"
    )
    words = QUESTION.split()
    assert known([" ".join(words[:13])])
    assert not known([" ".join(words[:12]), " ".join(words[12:])])  # 12 in one text, and a run does not span texts
    assert not known([" ".join([*words[:9], "and", *words[9:]])])
    assert Contamination([QUESTION], 5)([" ".join(words[3:8])])


def test_a_short_evaluation_text_has_no_run() -> None:
    assert not Contamination(["What is two plus two?"], 13)(["What is two plus two?"])


def test_texts_are_found_in_any_form() -> None:
    row = {"messages": [{"role": "user", "content": "a"}], "answer": "b", "number": 3, "choices": ["c", ["d"]]}
    assert list(texts_in(row)) == ["user", "a", "b", "c", "d"]


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_finds_the_test_questions_in_a_published_training_set() -> None:
    rows = [json.loads(line) for line in (DATA / "math_noisy_rationales" / "train.jsonl").read_text().splitlines()]
    labels = [json.loads(line) for line in (DATA / "math_noisy_rationales" / "labels.jsonl").read_text().splitlines()]
    test = [json.loads(line) for line in (DATA / "gsm8k" / "test.jsonl").read_text().splitlines()]
    known = Contamination([row["question"] for row in test])
    found = [bool(known([row["instruction"]])) for row in rows]
    listed = ["gsm8k" in " ".join(label["also_in_test_of"]) for label in labels]
    missed = sum(one and not other for one, other in zip(listed, found, strict=True))
    wrong = sum(other and not one for one, other in zip(listed, found, strict=True))
    # The labels compare whole questions: a run of words also finds those that differ elsewhere.
    assert missed <= 0.01 * sum(listed)
    assert wrong <= 0.02 * len(rows)
