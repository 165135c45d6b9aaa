"""What scores say on real rows with the bundled model: as much as the specification measured, and no more."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data_selection import build_scorer
from finetune.data_selection.engine.rater import Rater
from finetune.data_selection.pool import Example
from finetune.models import load_model, load_tokenizer
from support.pools import examples

ALPACA = Path(__file__).parents[3] / "shared" / "data" / "alpaca_random" / "train.jsonl"
MODEL = "bundled:smollm2-135m-instruct"

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not ALPACA.is_file(), reason="needs ../shared/data/alpaca_random"),
]


@pytest.fixture(scope="module")
def rater() -> Rater:
    return Rater(load_model(MODEL, dtype="float32"), load_tokenizer(MODEL), MODEL)


def pairs(rater: Rater, count: int, longest: int = 96) -> list[tuple[str, str]]:
    """Returns the first rows without an input that are short and have more than a word to say."""
    rows = [json.loads(line) for line in ALPACA.read_text(encoding="utf-8").splitlines()[:400]]
    found = [(row["instruction"], row["output"]) for row in rows if not row["input"] and len(row["output"]) > 40]
    fits = examples(rater.tokenizer, found, max_length=longest)
    return [(turn.instruction, turn.answer) for example in fits[:count] for turn in example.exchanges]


def values(name: str, rater: Rater, pool: tuple[Example, ...]) -> list[float]:
    scorer: Any = build_scorer({"name": name})
    return [scorer.score(example, row).value for example, row in zip(pool, scorer.measure(rater, pool), strict=True)]


def test_ifd_tells_answers_of_others_from_own_ones(rater: Rater) -> None:
    own = pairs(rater, 24)
    others = [(asked, said) for (asked, _), (_, said) in zip(own, [*own[1:], own[0]], strict=True)]
    intact, mismatched = (values("ifd", rater, examples(rater.tokenizer, rows)) for rows in (own, others))
    wins = [(one > other) + (one == other) / 2 for one, other in itertools.product(mismatched, intact)]
    assert sum(wins) / len(wins) > 0.8


@pytest.mark.parametrize(
    ("form", "warns"),
    [({}, True), ({"form": "chat", "order": "example_first", "assistant_prefix": "Score: "}, False)],
)
def test_the_warning_that_nobody_answers_is_given_where_nobody_does(
    rater: Rater, form: dict[str, str], warns: bool
) -> None:
    scorer: Any = build_scorer({"name": "selectit", **form})
    pool = examples(rater.tokenizer, pairs(rater, 4))
    scorer.begin(rater, pool)
    notes = scorer.diagnose([[row] for row in scorer.measure(rater, pool)])
    assert any("the likeliest token is no rating" in note for note in notes) == warns
