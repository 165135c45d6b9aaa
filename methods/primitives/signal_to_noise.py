"""How much of a weight matrix stands out from noise: the score by which Spectrum chooses modules.

Singular values come from the smaller Gram matrix, which is several times faster than a singular value decomposition.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch
from torch import Tensor

from finetune.core.errors import TargetError

__all__ = [
    "Threshold",
    "gram_matrix",
    "noise_edge",
    "noise_median",
    "require_scorable",
    "roots_of_gram",
    "signal_to_noise",
    "singular_values",
]

Threshold = Literal["spectrum", "median"]

_QUARTILES_OF_NORMAL = 1.349
"""Distance of the quartiles of a normal distribution, in standard deviations."""
_CHUNK = 1 << 19
"""Entries that are widened at a time."""


def singular_values(matrix: Tensor, *, precise: bool = False) -> Tensor:
    """Returns the singular values of a matrix (n, m), float64 ascending (min(n, m),).

    Args:
        matrix: In any floating dtype.
        precise: See :func:`gram_matrix`.
    """
    return roots_of_gram(gram_matrix(matrix, precise=precise))


def gram_matrix(matrix: Tensor, *, precise: bool = False) -> Tensor:
    """Returns the smaller of a matrix's two products with itself (p, p), p = min(n, m); nothing of its size is copied.

    Args:
        matrix: In any floating dtype (n, m).
        precise: Whether the product is formed in float64. Float32 loses singular values below some 3e-4 of the largest,
            which matter only where two scores are nearly equal.
    """
    long = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.t()
    dtype = torch.float64 if precise else torch.float32
    gram = torch.zeros(long.shape[1], long.shape[1], dtype=dtype, device=matrix.device)
    rows = max(1, _CHUNK // long.shape[1])
    for start in range(0, long.shape[0], rows):
        wide = long[start : start + rows].to(dtype)
        gram.addmm_(wide.t(), wide)
    return gram


def roots_of_gram(gram: Tensor) -> Tensor:
    """Returns the singular values of the matrix whose product with itself is ``gram``, float64 ascending (p,)."""
    squares: Tensor = torch.linalg.eigvalsh(gram)
    return squares.clamp_(min=0).sqrt_().double()


def signal_to_noise(values: Tensor, rows: int, columns: int, threshold: Threshold = "spectrum") -> float:
    """Returns the sum of the singular values above the noise edge over that of the others, divided by the largest.

    Args:
        values: All singular values, float64 ascending (p,).
        rows: Of the matrix.
        columns: Of the matrix.
        threshold: See :func:`noise_edge`.

    Returns:
        The score; infinite where all values stand out.

    References:
        Hartford et al., "Spectrum: Targeted Training on Signal to Noise Ratio", arXiv 2406.06623, section 3.
    """
    signal = values > noise_edge(values, rows, columns, threshold)
    noise = float(values[~signal].sum())
    return float(values[signal].sum()) / noise / float(values[-1]) if noise > 0 else math.inf


def noise_edge(values: Tensor, rows: int, columns: int, threshold: Threshold) -> float:
    """Returns the singular value above which there is signal.

    ``spectrum`` is the published rule: the spread of the singular values, by their quartiles, is taken for that of the
    entries, so that it lies far below the edge of noise. ``median`` estimates the spread of the entries from the median
    and gives the edge of the Marchenko-Pastur law, which noise does not pass.
    """
    short, long = sorted((rows, columns))
    beta = short / long
    if threshold == "spectrum":
        low, high = torch.quantile(
            values, torch.tensor([0.25, 0.75], dtype=values.dtype, device=values.device)
        ).tolist()
        return float((high - low) / _QUARTILES_OF_NORMAL * (1 + math.sqrt(beta)))
    deviation = float(torch.quantile(values, 0.5)) / (noise_median(beta) * math.sqrt(long))
    return deviation * (math.sqrt(rows) + math.sqrt(columns))


@functools.cache
def noise_median(beta: float) -> float:
    """Returns the median singular value of a noise matrix, in units of its entries' deviation times ``sqrt(long)``.

    It is that of the density ``sqrt((b^2 - x^2)(x^2 - a^2)) / (pi beta x)`` on [a, b] = 1 -+ sqrt(beta).

    Args:
        beta: Ratio of the shorter to the longer side, in (0, 1].
    """
    low, high = 1 - math.sqrt(beta), 1 + math.sqrt(beta)
    # Midpoints on a cosine grid: the density has root-like ends.
    angle = (torch.arange(100_000, dtype=torch.float64) + 0.5) * (math.pi / 100_000)
    x = (low + high) / 2 - (high - low) / 2 * angle.cos()
    density = ((high**2 - x**2) * (x**2 - low**2)).clamp(min=0).sqrt() / x
    mass = (density * angle.sin()).cumsum(0)
    return float(x[torch.searchsorted(mass, mass[-1] / 2)])


def require_scorable(name: str, matrix: Tensor) -> None:
    """Refuses a matrix that has no score.

    Raises:
        TargetError: It is zero, or holds values that are not finite.
    """
    low, high = (float(end) for end in matrix.aminmax())
    largest = max(-low, high) if math.isfinite(low + high) else math.inf
    if largest == 0 or not math.isfinite(largest):
        raise TargetError(
            "a weight has no signal-to-noise ratio",
            where=name,
            got="all zero" if largest == 0 else "values that are not finite",
            want="finite weights",
        )
