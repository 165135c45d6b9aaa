"""How the losses of a step become slopes, wherever each of them was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ONE_SIDED", "TWO_POINT", "Estimate", "Losses", "Point", "SlopeRule"]

Losses = Callable[[int, float], Tensor]
"""``loss_at(query, scale)``: the loss with the weights moved by ``scale`` along a direction; 0 leaves them."""
Point = tuple[int, float]
"""A direction, and how many distances the weights are moved along it: 1, -1 or 0."""


@dataclass(frozen=True)
class Estimate:
    """What forward passes found out.

    Attributes:
        loss: Mean of the losses, 0-d.
        slopes: Gradient of each element of the parameter, (queries,): the share of the estimate that its direction has.
    """

    loss: Tensor
    slopes: Tensor


@dataclass(frozen=True)
class SlopeRule:
    """Where a step measures the loss, and what it makes of it.

    Attributes:
        points: Returns the points of so many directions.
        estimate: Returns the estimate of their losses, float64 (points,), at a distance.
    """

    points: Callable[[int], list[Point]]
    estimate: Callable[[Tensor, float], Estimate]

    @staticmethod
    def measure(loss_at: Losses, points: Sequence[Point], eps: float) -> Tensor:
        """Returns the losses at some of the points, float64 (points,)."""
        return torch.stack([loss_at(query, sign * eps) for query, sign in points]).double()


def _both_sides(queries: int) -> list[Point]:
    return [(query, sign) for query in range(queries) for sign in (1.0, -1.0)]


def _central(losses: Tensor, eps: float) -> Estimate:
    plus, minus = losses.view(-1, 2).unbind(1)
    return Estimate(losses.mean(), (plus - minus) / (2 * eps * len(plus)))


def _here_and_ahead(queries: int) -> list[Point]:
    return [(0, 0.0), *((query, 1.0) for query in range(queries))]


def _normalised(losses: Tensor, eps: float) -> Estimate:
    clean, ahead = losses[0], losses[1:]
    sigma = ahead.std()
    return Estimate(clean, torch.where(sigma == 0, 0.0, (ahead - clean) / (len(ahead) * sigma)))


TWO_POINT = SlopeRule(_both_sides, _central)
"""``g_i = (L(W + eps z_i) - L(W - eps z_i)) / 2 eps``, averaged over the directions (SPSA; MeZO, eq. 1)."""
ONE_SIDED = SlopeRule(_here_and_ahead, _normalised)
"""``(L(W + eps z_i) - L(W)) / (N sigma)``, sigma being the deviation of the N losses (FZOO, eq. 5).

Since sigma is near ``eps`` times the norm of the gradient, the step is that of normalised descent. Where all losses are
the same, the slopes are zero."""
