"""The benchmark convention, and the parts of the SST-2 benchmark on a tiny model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("claims")


@pytest.mark.parametrize(
    ("goal", "holds"), [("", None), (">= 0.5", True), (">= 0.6", False), ("<= 0.5", True), ("<= 0.4", False)]
)
def test_a_claim_knows_whether_its_goal_is_reached(claims: Any, goal: str, holds: bool | None) -> None:
    assert claims.Claim("lora/accuracy", 0.5, "share", goal).holds is holds


def test_claims_are_written_with_the_environment(claims: Any, tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    claims.report("a title", [claims.Claim("lora/accuracy", 0.5, "share", ">= 0.4", 0.25)], path)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["environment"]
    assert written["claims"] == [
        {"name": "lora/accuracy", "value": 0.5, "unit": "share", "goal": ">= 0.4", "baseline": 0.25, "holds": True}
    ]


def test_every_scorer_is_asked_about_mismatched_pairs(claims: Any) -> None:
    from finetune.data_selection import discover

    meaning = importlib.import_module("selection_meaning")
    assert {spec["name"] for spec in meaning.SCORERS.values()} == set(discover())


@pytest.mark.parametrize(("name", "auroc"), [("ifd_ppl", 0.875), ("judge", 0.125)])
def test_a_mismatched_pair_looks_worse_at_the_end_that_the_scorer_measures_loss_by(
    claims: Any, name: str, auroc: float
) -> None:
    meaning = importlib.import_module("selection_meaning")
    # Of the four pairs of rows three are higher and one is equal.
    found = meaning.claims_of(name, [1.0, 2.0, None], [2.0, 3.0])
    assert [(claim.name.split("/")[1], claim.value) for claim in found] == [
        ("auroc_mismatched_looks_worse", auroc),
        ("rows_with_a_score", 4),
    ]


def test_sst2_scores_the_last_position_and_learns(
    claims: Any, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sst2 = importlib.import_module("sst2")
    generator = torch.Generator().manual_seed(0)
    prompts, labels = [], []
    for number in range(64):
        length = int(torch.randint(2, 9, (), generator=generator))
        prompts.append([*torch.randint(10, 200, (length,), generator=generator).tolist(), 7 + number % 2])
        labels.append(number % 2)
    phrases = sst2.Phrases(prompts, labels)
    logits = sst2.last_logits(tiny_llama, prompts[:5])
    for row, prompt in enumerate(prompts[:5]):
        alone = tiny_llama(input_ids=torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(logits[row], alone, rtol=0, atol=1e-4)
    for _ in range(6):
        figures = sst2.train(tiny_llama, phrases, [300, 301], 3e-3)
    assert figures["steps"] == 2
    after = sst2.score(tiny_llama, phrases, [300, 301])
    assert after["median_threshold_accuracy"] > 0.9
