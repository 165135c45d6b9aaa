"""Which examples share a row: best-fit decreasing, the same for the same lengths."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

__all__ = ["pack"]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Returns rows of positions in ``lengths``, each of at most ``capacity`` tokens.

    Longest first, each into the row that it fills best; about one percent more rows than the least possible on
    instruction data, in n log n time.
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (space left, row), ascending
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fit = bisect.bisect_left(spaces, (lengths[position], -1))
        if fit == len(spaces):
            space, row = capacity, len(rows)
            rows.append([])
        else:
            space, row = spaces.pop(fit)
        rows[row].append(position)
        if space > lengths[position]:
            bisect.insort(spaces, (space - lengths[position], row))
    return rows
