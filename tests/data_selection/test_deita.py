"""DEITA's score against whole logits, and its expectation by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from finetune.core.errors import ConfigError
from finetune.data_selection import build_scorer
from finetune.data_selection.engine.rater import Rater
from finetune.data_selection.rating.uncertainty import expected_rating
from support.pools import PAIRS, examples
from support.tiny import tiny_gpt2, tiny_llama, tiny_tokenizer


def test_the_expected_rating_by_hand() -> None:
    assert expected_rating([0, 0, 1, 2, 1, 0]) == pytest.approx(3.810434, abs=1e-6)
    assert expected_rating([5.0] * 6) == pytest.approx(3.5)


def expectation(rater: Rater, text: str) -> float:
    digits = [rater.tokenizer("\n" + str(k), add_special_tokens=False)["input_ids"][-1] for k in range(1, 7)]
    with torch.no_grad():
        logits = rater.model(**rater.tokenizer(text, return_tensors="pt")).logits[0, -1, digits]
    weights = [math.exp(float(logit)) for logit in logits]
    return sum(k * weight for k, weight in enumerate(weights, 1)) / sum(weights)


def test_two_judges_rate_every_turn_each_with_its_own_question() -> None:
    tokenizer = tiny_tokenizer()
    raters = {"first": Rater(tiny_llama(), tokenizer), "second": Rater(tiny_gpt2(), tokenizer)}
    scorer: Any = build_scorer(
        {
            "name": "deita",
            "complexity_model": "first",
            "complexity_prompt": "How hard, 1 to {scale}? {instruction}\n",
            "quality_prompt": "{instruction} {answer}: 1 to {scale}\n",
        }
    )
    names = scorer.models("second")
    assert names == ["first", "second"]
    braces = ("What does {this} do?", "It says {answer}.")
    pool = examples(tokenizer, [PAIRS[0], (*PAIRS[1], *PAIRS[2]), braces])
    evidence = [scorer.measurer(number, name, raters.get, pool)(pool) for number, name in enumerate(names)]
    for example, *found in zip(pool, *evidence, strict=True):
        expected = sum(
            expectation(raters["first"], f"How hard, 1 to 6? {turn.instruction}\n")
            * expectation(raters["second"], f"{turn.instruction} {turn.answer}: 1 to 6\n")
            for turn in example.exchanges
        )
        assert scorer.score(example, *found).value == pytest.approx(expected, rel=1e-5)


def test_a_prompt_that_cannot_be_filled_in_is_answered() -> None:
    with pytest.raises(ConfigError) as caught:
        build_scorer({"name": "deita", "quality_prompt": "Rate {response}."})
    assert caught.value.where == "select.scorer.quality_prompt"
    assert "{answer}" in caught.value.what


def test_one_model_may_be_both_judges() -> None:
    rater = Rater(tiny_llama(), tiny_tokenizer())
    scorer = build_scorer({"name": "deita"})
    pool = examples(rater.tokenizer)[:2]
    assert scorer.models("m") == ["m", "m"]
    found = [scorer.measurer(number, "m", lambda name: rater, pool)(pool) for number in (0, 1)]
    assert [set(row) for row in found[0] + found[1]] == [{"complexity"}] * 2 + [{"quality"}] * 2  # type: ignore[arg-type]
