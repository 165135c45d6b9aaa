"""LESS against dense gradients, moments and cosines worked out one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from finetune.core.errors import ConfigError
from finetune.data_selection import build_scorer
from finetune.data_selection.engine.influence import CountSketch, WarmUp, adam_direction
from finetune.data_selection.engine.rater import Rater
from support.pools import PAIRS, examples
from support.tiny import tiny_llama, tiny_tokenizer

SETTINGS: dict[str, Any] = {"r": 2, "lora_alpha": 4, "learning_rate": 1e-2, "warmup_epochs": 2, "warmup_batch": 2}


def rater() -> Rater:
    return Rater(tiny_llama(), tiny_tokenizer())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("targets")
    for name, rows in (("a", PAIRS[:2]), ("b", PAIRS[4:6])):
        lines = [json.dumps({"prompt": asked, "completion": said}) + "\n" for asked, said in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return [str(folder / f"{name}.jsonl") for name in "ab"]


def test_the_adam_direction_by_hand() -> None:
    found = adam_direction(
        torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.0]), torch.tensor([0.25, 1.0]), betas=(0.9, 0.99), eps=0.01
    )
    expected = [(0.45 + 0.1) / (0.2475 + 0.01 + 0.01) ** 0.5, -0.2 / (0.99 + 0.04 + 0.01) ** 0.5]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_sketch_is_linear_and_keeps_inner_products_in_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 400, generator=generator)
    exact = float(one @ other)
    found = []
    for seed in range(300):
        sketch = CountSketch(400, 64, seed, "cpu")
        found.append(float(sketch(one) @ sketch(other)))
        torch.testing.assert_close(sketch(one + 2 * other), sketch(one) + 2 * sketch(other))
    # The variance of one is (|x|^2 |y|^2 + (x y)^2) / 64; three hundred are averaged, three deviations allowed.
    deviation = float(((one @ one) * (other @ other) + exact**2) / 64 / 300) ** 0.5
    assert sum(found) / 300 == pytest.approx(exact, abs=3 * deviation)
    assert float(CountSketch(400, 64, 1, "cpu")(one).norm()) != float(CountSketch(400, 64, 2, "cpu")(one).norm())


def dense_scores(pool: Any, targets: list[Any]) -> list[float]:
    """The paper's sums with whole gradients, by plain autograd and a plain AdamW step."""
    import random

    by_key = sorted(pool, key=lambda example: example.key)
    sample = random.Random(0).sample(by_key, round(0.6 * len(pool)))
    trained = WarmUp(rater(), sample, epochs=2, r=2, lora_alpha=4, learning_rate=1e-2, batch_rows=2, seed=0)
    totals, rates = torch.zeros(len(pool), len(targets)), []
    for _ in range(2):
        trained.train_epoch()
        first, second = trained.moments()
        rates.append(trained.mean_learning_rate)
        values = [torch.stack([unit(trained.gradient(row)) for row in rows]).mean(0) for rows in targets]
        for place, row in enumerate(pool):
            gradient = trained.gradient(row)
            direction = (0.9 * first + 0.1 * gradient) / (0.999 * second + 0.001 * gradient**2 + 1e-8).sqrt()
            totals[place] += rates[-1] * torch.stack([unit(direction) @ value for value in values])
    found: list[float] = (totals.max(1).values / sum(rates)).tolist()
    return found


def unit(vector: Tensor) -> Tensor:
    return vector / vector.norm()


def test_a_wide_sketch_gives_the_dense_scores(target: list[str]) -> None:
    pool = examples(tiny_tokenizer())
    scorer = build_scorer({"name": "less", "target": target, **SETTINGS, "warmup_fraction": 0.6, "projection": 1 << 16})
    scorer.check(pool, tiny_tokenizer())
    assert scorer.models("m") == ["m", "m"]
    evidence = [scorer.measurer(number, "m", lambda name: rater(), pool)(pool) for number in range(2)]
    found = [score.value for score in scorer.score_pool(pool, list(zip(*evidence, strict=True)))]  # type: ignore[arg-type]
    expected = dense_scores(pool, [examples(tiny_tokenizer(), PAIRS[:2]), examples(tiny_tokenizer(), PAIRS[4:6])])
    assert found == pytest.approx(expected, abs=0.03)  # cosines are off by about 1 / sqrt(65536), in two sums
    # Going on after the first epoch was measured trains two epochs, and comes to the same.
    again = build_scorer({"name": "less", "target": target, **SETTINGS, "warmup_fraction": 0.6, "projection": 1 << 16})
    assert again.measurer(1, "m", lambda name: rater(), pool)(pool) == evidence[1]


def test_the_learning_rate_falls_to_zero_and_its_mean_is_the_weight() -> None:
    pool = examples(tiny_tokenizer())[:4]
    trained = WarmUp(rater(), pool, epochs=2, r=2, lora_alpha=4, learning_rate=1.0, batch_rows=2, seed=0)
    trained.train_epoch()
    assert trained.mean_learning_rate == pytest.approx((1 + 0.75) / 2)
    trained.train_epoch()
    assert trained.mean_learning_rate == pytest.approx((0.5 + 0.25) / 2)


def test_gradients_are_those_of_finite_differences() -> None:
    row = examples(tiny_tokenizer())[2]
    model = tiny_llama(dtype=torch.float64)
    trained = WarmUp(
        Rater(model, tiny_tokenizer()), [row], epochs=1, r=2, lora_alpha=4, learning_rate=1e-2, batch_rows=1, seed=0
    )
    trained.train_epoch()
    gradient = trained.gradient(row)
    place = int(gradient.abs().argmax())
    seen = 0
    for parameter in trained._trained:
        if place < seen + parameter.numel():
            break
        seen += parameter.numel()
    losses = []
    for step in (1e-4, -2e-4):
        with torch.no_grad():
            parameter.view(-1)[place - seen] += step
            losses.append(float(trained._loss(row)))
    assert (losses[0] - losses[1]) / 2e-4 == pytest.approx(float(gradient[place]), rel=1e-2)


@pytest.mark.parametrize("target", [[], ["no-such.jsonl"]])
def test_without_a_target_there_is_nothing_to_help_with(target: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_scorer({"name": "less", "target": target}).check(examples(tiny_tokenizer()), tiny_tokenizer())
    assert caught.value.where == "select.scorer.target"


def test_a_target_may_be_a_file_that_is_shipped() -> None:
    shipped = "shipped:cofitune/general.jsonl"
    for spec in ({"name": "less", "target": [shipped]}, {"name": "rds_plus", "target": shipped}):
        scorer = build_scorer(spec)
        scorer.check(examples(tiny_tokenizer()), tiny_tokenizer())
        assert scorer.fingerprint()["target"]


def test_the_fingerprint_is_that_of_the_targets_content(target: list[str], tmp_path: Path) -> None:
    copy = tmp_path / "moved.jsonl"
    copy.write_bytes(Path(target[0]).read_bytes())
    one, other = (build_scorer({"name": "less", "target": [path]}).fingerprint() for path in (target[0], str(copy)))
    assert one == other
