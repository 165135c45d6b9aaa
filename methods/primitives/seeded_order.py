"""Orders that depend on a seed and a number only: the same in every process, whatever was drawn before."""

from __future__ import annotations

import hashlib
import random

__all__ = ["seeded_order"]


def seeded_order(count: int, seed: int, number: int) -> list[int]:
    """Returns the ``number``-th permutation of ``range(count)`` that belongs to ``seed``."""
    key = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return random.Random(int.from_bytes(key[:8], "big")).sample(range(count), count)
