"""How many rows each source gives."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["balanced_quotas", "proportional_quotas"]


def balanced_quotas(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Returns equal quotas; what a source cannot fill goes to the others, a remainder to the first ones in order.

    Args:
        sizes: Rows that each source has.
        total: Rows to be given, at most.
    """
    quotas = dict.fromkeys(sizes, 0)
    left = min(total, sum(sizes.values()))
    while left:
        open_ones = [source for source in sizes if quotas[source] < sizes[source]]
        share = max(1, left // len(open_ones))
        for source in open_ones:
            given = min(share, sizes[source] - quotas[source], left)
            quotas[source] += given
            left -= given
    return quotas


def proportional_quotas(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Returns quotas in proportion to the sizes, by largest remainder; equal remainders go by order."""
    whole = sum(sizes.values())
    exact = {source: total * size / whole for source, size in sizes.items()}
    quotas = {source: int(quota) for source, quota in exact.items()}
    by_remainder = sorted(sizes, key=lambda source: quotas[source] - exact[source])
    for source in by_remainder[: total - sum(quotas.values())]:
        quotas[source] += 1
    return quotas
