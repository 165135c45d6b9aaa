"""Noise that is a function of its place: an integer hash of a key, a row and a column.

Every entry can be made alone, so a shard, a slice or another device finds the same noise as the whole tensor on one
device, and nothing is drawn from torch's generators. All arithmetic is modulo 2^32, of keys modulo 2^64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "Noise",
    "derive_key",
    "hash_integers",
    "hash_tile",
    "noise_of_hash",
    "rounding_bits",
    "row_tiles",
    "row_vectors",
]

Noise = Literal["rademacher", "binomial", "gaussian"]
"""Distributions of mean 0 and variance 1. Rademacher and binomial noise is the same bits on every IEEE device."""

_MASK32, _MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
_GOLDEN32, _GOLDEN64 = 0x9E3779B9, 0x9E3779B97F4A7C15
_OTHER, _ROUNDING = 0x3C6EF372, 0xDAA66D2B
_TILE = 1 << 17
"""Entries that are hashed at a time: intermediate results stay in the cache."""


def derive_key(*parts: int) -> int:
    """Returns the 64-bit key of some non-negative integers: run seed, step, query, parameter."""
    key = 0
    for part in parts:
        mixed = ((key ^ part) + _GOLDEN64) & _MASK64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
        key = mixed ^ (mixed >> 31)
    return key


def hash_integers(key: int, row: int, column: int) -> int:
    """Returns the hash of one entry in plain integers: what the tensor form is checked against."""
    low, high = key & _MASK32, key >> 32
    a = _mix_integer(_mix_integer((row + _GOLDEN32) & _MASK32) ^ low)
    b = _mix_integer((a + high) & _MASK32)
    return _mix_integer(_mix_integer((column + a) & _MASK32) ^ b)


def row_vectors(key: int, first: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns what the hash knows of the rows ``first`` to ``first + rows``: two int32 (rows, 1)."""
    low, high = _signed(key & _MASK32), _signed(key >> 32)
    row = torch.arange(first, first + rows, dtype=torch.int32, device=device)
    a = _mix(_mix(row.add_(_signed(_GOLDEN32))).bitwise_xor_(low))
    b = _mix(a + high)
    return a.unsqueeze(1), b.unsqueeze(1)


def hash_tile(a: Tensor, b: Tensor, columns: Tensor) -> Tensor:
    """Returns the hash of every row and column, int32 (rows, columns).

    Args:
        a: First of :func:`row_vectors`.
        b: Second of them.
        columns: Column numbers, int32 (columns,).
    """
    return _mix(_mix(columns + a).bitwise_xor_(b))


def noise_of_hash(hashed: Tensor, noise: Noise) -> Tensor:
    """Returns the noise that a hash stands for, float32 of its shape; ``hashed`` is overwritten."""
    if noise == "rademacher":
        # The top bit: 0 -> 1, 1 -> -1.
        return hashed.bitwise_right_shift_(31).bitwise_or_(1).float()
    if noise == "binomial":
        return _population_count(hashed).sub_(16).float().mul_(1 / math.sqrt(8))
    radius = ((hashed >> 8) & 0xFFFFFF).float().add_(0.5).mul_(2**-24).log_().mul_(-2).sqrt_()
    angle = ((_mix(hashed.add_(_OTHER)) >> 8) & 0xFFFFFF).float().mul_(2 * math.pi * 2**-24)
    return radius.mul_(angle.cos_())


def rounding_bits(hashed: Tensor) -> Tensor:
    """Returns 16 random bits per entry, int32, independent of the noise that ``hashed`` stands for."""
    return _mix(hashed + _signed(_ROUNDING)).bitwise_and_(0xFFFF)


def row_tiles(rows: int, columns: int) -> Iterator[slice]:
    """Yields the rows in pieces whose intermediate results stay in the cache."""
    height = max(1, _TILE // max(1, columns))
    for start in range(0, rows, height):
        yield slice(start, min(rows, start + height))


def _mix(x: Tensor) -> Tensor:
    # Shifts of int32 are arithmetic: the mask makes them logical.
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(_SECOND))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _mix_integer(x: int) -> int:
    x = ((x ^ (x >> 16)) * _FIRST) & _MASK32
    x = ((x ^ (x >> 15)) * _SECOND) & _MASK32
    return x ^ (x >> 16)


def _population_count(x: Tensor) -> Tensor:
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24) & 0xFF


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
