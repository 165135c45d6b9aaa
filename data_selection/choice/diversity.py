"""Orders and rules that look at how rows lie to each other.

Legend: N rows, Q queries, D width of a vector.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["SimilarityFilter", "farthest_first", "lazy_greedy", "round_robin"]


class SimilarityFilter:
    """Refuses a row that is too close to one that was chosen before (DEITA's rule; every chosen row counts at once).

    Args:
        vectors_ND: Unit vectors.
        threshold: Largest cosine to a chosen row, in [-1, 1].
    """

    def __init__(self, vectors_ND: NDArray[np.float32], threshold: float) -> None:
        self._vectors, self._threshold = vectors_ND, threshold
        self._nearest = np.full(len(vectors_ND), -np.inf, dtype=np.float32)

    def refuses(self, position: int) -> str:
        """Returns why the row at ``position`` is not to be chosen, or nothing."""
        return "too similar to a row that ranks higher" if self._nearest[position] > self._threshold else ""

    def take(self, position: int) -> None:
        """Counts the row at ``position`` as chosen."""
        np.maximum(self._nearest, self._vectors @ self._vectors[position], out=self._nearest)


def farthest_first(vectors_ND: NDArray[np.float32], first: int = 0) -> list[int]:
    """Returns all positions, each the farthest (Euclidean) from those before it; of equal ones the lower.

    The first k are Gonzalez' greedy solution of the k-center problem. Distances are updated after every pick.
    """
    squares_N = (vectors_ND**2).sum(1)
    nearest_N = np.full(len(vectors_ND), np.inf)
    order = [first]
    while len(order) < len(vectors_ND):
        last = order[-1]
        distance_N = squares_N + squares_N[last] - 2 * (vectors_ND @ vectors_ND[last])
        np.minimum(nearest_N, distance_N, out=nearest_N)
        nearest_N[last] = -np.inf
        order.append(int(nearest_N.argmax()))
    return order


def lazy_greedy(count: int, similar: Callable[[int], NDArray[np.float32]], *, least: float) -> list[int]:
    """Returns all positions, each that which adds most to ``sum_i max_{j in S} sim(i, j)``; of equal ones the lower.

    What a position adds never grows (the sum is submodular), so a value from an earlier round is a bound: the position
    with the highest bound is looked at again, and picked if it still is the highest (Minoux 1978).

    Args:
        count: How many positions there are.
        similar: Similarity of all positions to one, (count,).
        least: The lowest similarity there can be; what a position has to S while S is empty.
    """
    best_N = np.full(count, least, dtype=np.float64)

    def gain(position: int) -> float:
        return float(np.maximum(similar(position) - best_N, 0).sum())

    bounds = [(-gain(position), position, 0) for position in range(count)]
    heapq.heapify(bounds)
    order: list[int] = []
    while bounds:
        _, position, known = heapq.heappop(bounds)
        if known < len(order):
            heapq.heappush(bounds, (-gain(position), position, len(order)))
            continue
        order.append(position)
        np.maximum(best_N, similar(position), out=best_N)
    return order


def round_robin(similarity_NQ: NDArray[np.float32]) -> list[int]:
    """Returns all rows in the order in which the queries, in turn, take the most similar one that is left."""
    preferences_QN = np.argsort(-similarity_NQ, axis=0, kind="stable").T
    queues = [iter(preference.tolist()) for preference in preferences_QN]
    taken: dict[int, None] = {}
    while len(taken) < len(similarity_NQ):
        for queue in queues:
            found = next((position for position in queue if position not in taken), None)
            if found is not None:
                taken[found] = None
    return list(taken)
