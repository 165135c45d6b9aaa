"""Confidence intervals: what a score on a finite number of rows says about the model."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["ratio_interval", "wilson_interval"]

_Z = 1.959963984540054
"""97.5 % point of the normal distribution: both intervals have 95 % coverage."""


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Returns the 95 % score interval of a proportion; it stays within [0, 1] and is right near both ends.

    References:
        Wilson 1927, equation (7); Brown, Cai and DasGupta 2001 recommend it over the normal interval.

    Args:
        successes: Rows that were right.
        count: Rows that were scored, at least 1.
    """
    share = successes / count
    denominator = 1 + _Z**2 / count
    centre = (share + _Z**2 / (2 * count)) / denominator
    half = _Z / denominator * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def ratio_interval(sums: Sequence[float], weights: Sequence[int]) -> tuple[float, float]:
    """Returns the 95 % normal interval of ``sum(sums) / sum(weights)`` over rows drawn independently.

    The rows, not the tokens, are the independent draws, so the variance is that of the ratio estimator. With fewer than
    two rows it is unknown, and the interval is infinite.

    Args:
        sums: The summed token losses of each row.
        weights: The number of scored tokens of each row.

    References:
        Cochran, Sampling Techniques, 3rd edition, equation (2.46).
    """
    count, total = len(sums), sum(weights)
    ratio = sum(sums) / total
    if count < 2:
        return -math.inf, math.inf
    residuals = sum((value - ratio * weight) ** 2 for value, weight in zip(sums, weights, strict=True))
    half = _Z * math.sqrt(residuals * count / (count - 1)) / total
    return ratio - half, ratio + half
