"""From probabilities of ratings to one score: SelectIT's arithmetic (arXiv 2402.16705, section 3), and DEITA's.

SelectIT's levels are nested: a model's score is made of its prompts' scores, a prompt's score of its ratings'
probabilities.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

__all__ = ["Normalization", "expected_rating", "model_level", "rating_shares", "sentence_level", "token_level"]

Normalization = Literal["paper", "official"]
"""``official`` takes a second softmax over the shares, as the published code does; the score is then below 1.28."""


def rating_shares(log_probabilities: Sequence[float]) -> list[float]:
    """Returns the probabilities of the ratings 1..K among each other."""
    highest = max(log_probabilities)
    weights = [math.exp(log_p - highest) for log_p in log_probabilities]
    return [weight / sum(weights) for weight in weights]


def expected_rating(log_probabilities: Sequence[float]) -> float:
    """Returns the mean of the ratings 1..K, each weighted by its share (DEITA, arXiv 2312.15685, section 3.1)."""
    return sum(rating * share for rating, share in enumerate(rating_shares(log_probabilities), 1))


def token_level(shares: Sequence[float], normalization: Normalization = "paper") -> float:
    """Returns the likeliest rating times the confidence in it, in [0, K].

    The paper's confidence, the mean distance of the other shares from the largest one, is ``(K p - 1) / (K - 1)``,
    since the shares sum to one. Of equal shares the lower rating counts.

    Args:
        shares: Probabilities of the ratings 1..K, which sum to one.
        normalization: Whether they are taken as they are.
    """
    if normalization == "official":
        shares = rating_shares(shares)
    count, largest = len(shares), max(shares)
    return (shares.index(largest) + 1) * (count * largest - 1) / (count - 1)


def sentence_level(scores: Sequence[float], alpha: float = 0.2) -> float:
    """Returns the mean over prompts, lowered by ``alpha`` times the standard deviation of the population."""
    return statistics.fmean(scores) / (1 + alpha * statistics.pstdev(scores))


def model_level(scores: Sequence[float], weights: Sequence[float]) -> float:
    """Returns the sum over models of weight times score."""
    return sum(weight * score for weight, score in zip(weights, scores, strict=True))
