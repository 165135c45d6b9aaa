"""``out = decay W + sum_i c_i z_i``: the one pass over a weight that perturbs it and the one that updates it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from finetune.methods.primitives.hash_noise import (
    Noise,
    hash_tile,
    noise_of_hash,
    rounding_bits,
    row_tiles,
    row_vectors,
)

__all__ = ["add_noise"]


@torch.no_grad()
def add_noise(
    out: Tensor,
    weight: Tensor,
    keys: Sequence[int],
    coefficients: Tensor,
    *,
    noise: Noise = "rademacher",
    limit: float | None = None,
    decay: float = 1.0,
    stochastic: bool = False,
    first: int = 0,
) -> None:
    """Writes ``decay weight + sum_i coefficients[i] z(keys[i])`` into ``out``, rounded once to its dtype.

    A 16-bit weight is widened to float32 before. Rows of the noise are the leading dimensions, columns the last one.

    Args:
        out: Shaped as ``weight``; it may be ``weight`` itself.
        weight: Floating point, any shape.
        keys: One per direction.
        coefficients: (len(keys),), on the weight's device.
        noise: Distribution of z.
        limit: Entries of larger magnitude stay as they are: Sparse-MeZO's mask.
        decay: What the weight is multiplied with, a rounding of its own.
        stochastic: Rounds to bfloat16 up or down by chance, so that steps below half a unit are not lost on average.
        first: Where ``weight`` begins along the first dimension of the tensor that it is a shard of.
    """
    source, target = _matrix(weight), _matrix(out)
    rows, columns = source.shape
    flat = weight.ndim < 2  # one row of the field
    column = torch.arange(columns, dtype=torch.int32, device=weight.device) + (first if flat else 0)
    row = 0 if flat else first * math.prod(weight.shape[1:-1])
    vectors = [row_vectors(key, row, rows, weight.device) for key in keys]
    for tile in row_tiles(rows, columns):
        piece = source[tile]
        value = piece.float() if piece.element_size() == 2 else piece
        if decay != 1.0:
            value = value * decay
        bits = None
        for (a, b), coefficient in zip(vectors, coefficients, strict=True):
            hashed = hash_tile(a[tile], b[tile], column)
            if stochastic and bits is None:
                bits = rounding_bits(hashed)
            value = value + noise_of_hash(hashed, noise).to(value.dtype).mul_(coefficient)
        if limit is not None:
            value = torch.where(piece.abs() > limit, piece.to(value.dtype), value)
        target[tile] = value if bits is None else _round_by_chance(value, bits)


def _matrix(tensor: Tensor) -> Tensor:
    if tensor.ndim == 2:
        return tensor
    return tensor.view(1, tensor.numel()) if tensor.ndim < 2 else tensor.flatten(0, -2)


def _round_by_chance(value: Tensor, bits: Tensor) -> Tensor:
    """Returns float32 values that bfloat16 holds exactly: the low half of the bits is added to and cut off."""
    return value.view(torch.int32).add(bits).bitwise_and_(-0x10000).view(torch.float32)
