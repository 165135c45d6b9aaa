"""The tree of module ranges, and the search down it (CoFiTune, arXiv 2404.10306, coarse level).

From halves of the depth to quarters, from whole layers to attention or feed-forward parts, to single projections; at
each level only the best of the level before are taken apart further.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["ATTENTION", "FEED_FORWARD", "Found", "Node", "Scores", "search_tree"]

ATTENTION, FEED_FORWARD = ("q", "k", "v"), ("up", "down")


@dataclass(frozen=True)
class Node:
    """A candidate: which modules of which layers train.

    Attributes:
        start: Where the range of layers begins, in percent of the depth.
        stop: Where it ends.
        modules: Projections that train.
    """

    start: int
    stop: int
    modules: tuple[str, ...] = ATTENTION + FEED_FORWARD

    @property
    def layers(self) -> str:
        """The range as ``method.layers`` takes it."""
        return f"{self.start}%-{self.stop}%"

    @property
    def name(self) -> str:
        """A name for a folder."""
        return f"{self.start:03d}-{self.stop:03d}_{'-'.join(self.modules)}"

    def children(self) -> list[Node]:
        """Returns what the node is taken apart into; nothing of a single projection or of attention."""
        if self.stop - self.start > 50:
            return [Node(start, start + 50) for start in (0, 25, 50)]
        if self.stop - self.start > 25:
            return [Node(start, start + 25) for start in (self.start, self.start + 25)]
        if len(self.modules) > len(ATTENTION):
            return [Node(self.start, self.stop, modules) for modules in (ATTENTION, FEED_FORWARD)]
        if self.modules == FEED_FORWARD:
            return [Node(self.start, self.stop, (module,)) for module in FEED_FORWARD]
        return []


@dataclass(frozen=True)
class Scores:
    """What a model reaches, both in percent.

    Attributes:
        speciality: On the task.
        versatility: In general.
    """

    speciality: float
    versatility: float

    def utility(self, weights: tuple[float, float]) -> float:
        """Returns their weighted sum."""
        return weights[0] * self.speciality + weights[1] * self.versatility


@dataclass(frozen=True)
class Found:
    """A candidate that was tried.

    Attributes:
        node: Which.
        scores: What it reached.
        utility: The weighted sum.
    """

    node: Node
    scores: Scores
    utility: float


def search_tree(
    score: Callable[[Node], Scores | None], *, beam: int = 1, weights: tuple[float, float] = (1.0, 1.0)
) -> list[Found]:
    """Goes down the tree and returns all that was tried, in order; the best is that of highest utility.

    Args:
        score: Trains a candidate and says what it reaches; None ends the search: the budget is spent.
        beam: How many candidates of each level are taken apart further.
        weights: Of speciality and versatility.
    """
    tried: list[Found] = []
    level: Sequence[Node] = [Node(0, 100)]
    while children := list(dict.fromkeys(child for node in level for child in node.children())):
        found = []
        for node in children:
            scores = score(node)
            if scores is None:
                return tried
            found.append(Found(node, scores, scores.utility(weights)))
            tried.append(found[-1])
        # Of equal ones the first: sorting is stable.
        level = [one.node for one in sorted(found, key=lambda one: -one.utility)[:beam]]
    return tried
