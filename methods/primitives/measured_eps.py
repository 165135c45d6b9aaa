"""How far apart two losses are measured: far enough that rounding does not drown their difference."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from finetune.core.errors import FinetuneWarning
from finetune.methods.primitives.process_group import mean_over_processes, process_rank
from finetune.methods.primitives.projected_gradient import Directions
from finetune.methods.primitives.shared_passes import SharedPasses
from finetune.methods.primitives.slope_rules import Estimate, Losses

__all__ = ["CANDIDATES", "Measurement", "choose_eps", "slope_noise"]

CANDIDATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Distances that ``auto`` measures at; the last one only judges the one before."""
_DIRECTIONS = 4
_TOLERANCE = 0.3
"""Largest error of a slope, as a share of the slopes."""
_NEARBY = (0.9, 1.0, 1.1)
_NO_STEP = 1 << 40
"""Directions from here on belong to no step of a run."""

_LOGGER = logging.getLogger(__name__)


@dataclass
class Measurement:
    """An estimate whose distance is settled when it is first made.

    Attributes:
        passes: What measures at that distance.
        directions: Along which the losses are measured.
        eps: The distance; ``auto`` until it is settled.
        settled: Whether it has been chosen, or compared with the rounding of the loss.
    """

    passes: SharedPasses
    directions: Directions
    eps: float | Literal["auto"]
    settled: bool = False

    def __call__(self, loss_at: Losses, *, weight: Tensor, batch: Mapping[str, Any]) -> Estimate:
        """Returns the estimate, of all processes."""
        if not self.settled:
            self.settled = True
            if self.eps == "auto":
                self.eps = choose_eps(_slopes(loss_at, self.directions, CANDIDATES))
            else:
                _warn_of_noise(loss_at, self.directions, self.eps)
        if self.eps == "auto":
            raise AssertionError("settled without a distance")
        return self.passes(loss_at, self.eps, weight=weight, batch=batch)


def choose_eps(slopes: Tensor) -> float:
    """Returns the smallest of :data:`CANDIDATES` at which slopes are nearly those at three times the distance.

    Below it rounding drowns them, far above it curvature bends them. The table goes to the log; where no distance is
    good enough, a warning says so and the one with the least error is taken.

    Args:
        slopes: float64 (candidates, directions).
    """
    rms = slopes.square().mean(1).sqrt()[:-1]
    errors = (slopes[1:] - slopes[:-1]).square().mean(1).sqrt() / rms
    good = [number for number, error in enumerate(errors.tolist()) if error < _TOLERANCE]
    chosen = good[0] if good else int(torch.nan_to_num(errors, nan=torch.inf).argmin())
    rows = [
        f"  {eps:7g}  {size:10.4g}  {error:10.2f}{'  <- chosen' if number == chosen else ''}"
        for number, (eps, size, error) in enumerate(zip(CANDIDATES, rms.tolist(), errors.tolist(), strict=False))
    ]
    table = "\n".join([f"  {'eps':>7}  {'rms slope':>10}  {'change':>10} at 3 eps", *rows])
    if process_rank() == 0:
        _LOGGER.info("eps: auto, slopes along %d directions\n%s", _DIRECTIONS, table)
        if not good:
            _warn(f"no eps gives slopes that are good to {_TOLERANCE:.0%}, so the best is taken\n{table}")
    return CANDIDATES[chosen]


def slope_noise(slopes: Tensor) -> tuple[float, float]:
    """Returns the rounding error of a slope and the size of slopes, root mean squares.

    A slope changes smoothly with the distance, so that its second difference is rounding: of variance
    ``1 / 0.9^2 + 4 + 1 / 1.1^2`` times that of a slope.

    Args:
        slopes: float64 (3, directions), at 0.9, 1 and 1.1 times the distance.
    """
    below, at, above = slopes
    weight = sum(factor**2 / near**2 for factor, near in zip((1, -2, 1), _NEARBY, strict=True))
    noise = ((below - 2 * at + above).square().mean() / weight).sqrt()
    return float(noise), float(at.square().mean().sqrt())


def _warn_of_noise(loss_at: Losses, directions: Directions, eps: float) -> None:
    noise, size = slope_noise(_slopes(loss_at, directions, [near * eps for near in _NEARBY]))
    if noise > _TOLERANCE * size and process_rank() == 0:
        _warn(
            f"eps {eps:g} is below the noise floor: rounding of the loss moves a slope by {noise:.3g}, and the slopes "
            f"are {size:.3g} (root mean squares along {_DIRECTIONS} directions), so steps are noise. Take eps: auto, "
            "a larger eps, or a float32 forward pass"
        )


def _warn(message: str) -> None:
    warnings.warn(message, FinetuneWarning, stacklevel=2)


def _slopes(loss_at: Losses, directions: Directions, distances: Sequence[float]) -> Tensor:
    """Returns two-point slopes along directions that no step takes, float64 (distances, directions)."""
    step = directions.step
    columns = []
    try:
        for number in range(_DIRECTIONS):
            directions.step = _NO_STEP + number
            slopes = [(loss_at(0, eps).double() - loss_at(0, -eps).double()) / (2 * eps) for eps in distances]
            columns.append(torch.stack(slopes))
    finally:
        directions.step = step
    return mean_over_processes(torch.stack(columns, 1))
