"""From scores to the rows that are kept: an order, who may be chosen, and how many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from finetune.core.errors import DataError
from finetune.data_selection.base import Direction, Score
from finetune.data_selection.choice.quotas import balanced_quotas, proportional_quotas

__all__ = ["Candidate", "Limits", "Rule", "choose", "rank"]


class Rule(Protocol):
    """A rule that looks at the rows chosen before.

    To refuse and to take are two steps: a row that another rule refuses is not chosen, so it must not count here.
    """

    def refuses(self, position: int) -> str:
        """Returns why the row at ``position`` is not to be chosen, or nothing; changes nothing."""

    def take(self, position: int) -> None:
        """Counts the row at ``position`` as chosen."""


@dataclass(frozen=True)
class Candidate:
    """A row that may be chosen.

    Attributes:
        position: In the pool.
        key: Breaks ties.
        score: What it scores.
        tokens: Its size.
        source: Where it is from.
    """

    position: int
    key: str
    score: Score
    tokens: int
    source: str


@dataclass(frozen=True)
class Limits:
    """How many rows are kept; None is no limit.

    Attributes:
        top: Most rows.
        fraction: Most rows as a share of all candidates, in (0, 1]; at least one row.
        budget: Most tokens.
        threshold: Score that a row has at least, or at most where the lowest are kept.
        per_source: ``equal`` gives each source the same number of rows, as far as it has them; ``proportional`` gives
            it its share of the pool.
    """

    top: int | None = None
    fraction: float | None = None
    budget: int | None = None
    threshold: float | None = None
    per_source: Literal["equal", "proportional"] | None = None

    def count(self, candidates: int) -> int:
        """Returns the most rows of so many candidates; a fraction is rounded down, but never to nothing."""
        limits = [candidates]
        limits += [] if self.top is None else [self.top]
        limits += [] if self.fraction is None else [max(1, int(self.fraction * candidates + 1e-9))]
        return min(limits)


def rank(candidates: Sequence[Candidate], direction: Direction) -> list[Candidate]:
    """Returns the candidates, the best first; of equal ones that with the lower key.

    ``middle`` goes outward from the median, so any number of the first is a band around it.
    """
    by_score = sorted(candidates, key=lambda one: (one.score.value, one.key))
    if direction == "lowest":
        return by_score
    if direction == "highest":
        return sorted(candidates, key=lambda one: (-one.score.value, one.key))
    center = (len(by_score) - 1) / 2
    return [by_score[place] for place in sorted(range(len(by_score)), key=lambda place: (abs(place - center), place))]


def choose(
    candidates: Sequence[Candidate],
    limits: Limits,
    *,
    direction: Direction,
    rules: Sequence[Rule] = (),
) -> tuple[list[int], dict[int, str]]:
    """Returns the positions of the rows that are kept, the best first, and why each other one is not.

    Args:
        candidates: All rows that have a score.
        limits: How many.
        direction: Which end of the scores is kept.
        rules: Asked in order of rank about each row that would be chosen.

    Raises:
        DataError: No row is kept.
    """
    left_out = {one.position: reason for one in candidates if (reason := _unfit(one, limits.threshold, direction))}
    ranked = rank([one for one in candidates if one.position not in left_out], direction)
    quotas = _quotas(candidates, left_out, limits)
    room, tokens = limits.count(len(candidates)), limits.budget
    chosen: list[int] = []
    for one in ranked:
        if len(chosen) >= room:
            reason = "others rank higher"
        elif tokens is not None and one.tokens > tokens:
            reason = "over the budget of tokens"
        elif quotas is not None and not quotas[one.source]:
            reason = "its source has its quota"
        else:
            reason = next((why for rule in rules if (why := rule.refuses(one.position))), "")
        if reason:
            left_out[one.position] = reason
            continue
        chosen.append(one.position)
        for rule in rules:
            rule.take(one.position)
        tokens = None if tokens is None else tokens - one.tokens
        if quotas is not None:
            quotas[one.source] -= 1
    if not chosen:
        reasons = sorted(set(left_out.values()))
        raise DataError("no row is kept", where="select", got="; ".join(reasons), fix="wider limits")
    return chosen, left_out


def _unfit(one: Candidate, threshold: float | None, direction: Direction) -> str:
    if one.score.excluded:
        return one.score.excluded
    if threshold is None:
        return ""
    beyond = one.score.value > threshold if direction == "lowest" else one.score.value < threshold
    return "beyond the threshold" if beyond else ""


def _quotas(pool: Sequence[Candidate], left_out: Container[int], limits: Limits) -> dict[str, int] | None:
    if limits.per_source is None:
        return None
    available = Counter(one.source for one in pool if one.position not in left_out)
    room = limits.count(len(pool))
    if limits.per_source == "equal":
        return balanced_quotas(available, room)
    return proportional_quotas(Counter(one.source for one in pool), room)
