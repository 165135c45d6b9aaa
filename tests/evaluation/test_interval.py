"""Intervals against published and simulated numbers."""

from __future__ import annotations

import math
import random

import pytest

from finetune.evaluation.interval import ratio_interval, wilson_interval


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_equals_newcombes_table(successes: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(successes, count) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_of_all_right_ends_at_one() -> None:
    assert wilson_interval(300, 300)[1] == pytest.approx(1.0)


def test_ratio_interval_covers_the_truth_in_95_percent_of_draws() -> None:
    draw = random.Random(0)
    covered, trials = 0, 400
    for _ in range(trials):
        weights = [1 + draw.randrange(20) for _ in range(150)]
        sums = [weight * (2.0 + draw.gauss(0, 0.5)) for weight in weights]
        low, high = ratio_interval(sums, weights)
        covered += low <= 2.0 <= high
    # 0.95 +- three standard errors of a share over 400 trials.
    assert covered / trials == pytest.approx(0.95, abs=0.033)


def test_ratio_interval_of_one_row_is_unknown() -> None:
    assert ratio_interval([3.0], [2]) == (-math.inf, math.inf)
