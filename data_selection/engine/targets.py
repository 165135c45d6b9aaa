"""The same target tokens with and without what comes before them: what the ratios of IFD are made of.

A target is tokenised once, and token ids are joined, so both sides score the same tokens. Where a tokenizer has
neither BOS nor EOS to stand before a target that is alone, its first token cannot be scored there and is left out on
both sides.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from finetune.data.render import IGNORED
from finetune.data_selection.base import Measured
from finetune.data_selection.engine.failures import UnscorableError
from finetune.data_selection.engine.rater import Loss, Rater, TargetRow

__all__ = ["Pair", "labelled_pair", "measure_pairs", "spoken_pair"]


@dataclass(frozen=True)
class Pair:
    """One example's targets.

    Attributes:
        given: The rows that hold them in their context.
        alone: Each of them without it.
    """

    given: Sequence[TargetRow]
    alone: Sequence[TargetRow]


def labelled_pair(input_ids: Sequence[int], labels: Sequence[int], start: Sequence[int], ends: Collection[int]) -> Pair:
    """Returns the targets of a rendered conversation: each run of labelled tokens.

    Args:
        input_ids: The conversation.
        labels: The same ids where they are targets, -100 elsewhere.
        start: What stands before a target that is alone.
        ends: Tokens that are no part of an answer's text, such as that which ends a turn.
    """
    kept = [IGNORED if label in ends else label for label in labels]
    kept[0] = IGNORED  # it has no context
    runs: list[list[int]] = []
    for before, label in itertools.pairwise(kept):
        if label != IGNORED:
            runs += [[]] if before == IGNORED else []
            runs[-1].append(label)
    given = kept if start else _without_first_of_runs(kept)
    return Pair([TargetRow(input_ids, given)], [_alone(run, start) for run in runs])


def _without_first_of_runs(labels: Sequence[int]) -> list[int]:
    return [IGNORED if place == 0 or labels[place - 1] == IGNORED else label for place, label in enumerate(labels)]


def spoken_pair(context: Sequence[int], target: Sequence[int], start: Sequence[int], limit: int | None) -> Pair:
    """Returns one target after one context.

    Args:
        context: Token ids before the target, ``start`` among them.
        target: Token ids that are scored.
        start: What stands before the target when it is alone.
        limit: Most tokens of a row; the target is cut at its end, on both sides alike.

    Raises:
        UnscorableError: Nothing of the target is left, or there is none.
    """
    kept = list(target if limit is None else target[: max(0, limit - len(context))])
    if len(kept) <= (not start):
        reason = "longer than the model's context" if len(target) > (not start) else "the text to score is empty"
        raise UnscorableError(reason, f"{len(context)} tokens before it, {len(target)} of its own")
    skipped = [IGNORED] * (not start)
    given = TargetRow([*context, *kept], [*[IGNORED] * len(context), *skipped, *kept[len(skipped) :]])
    return Pair([given], [_alone(kept, start)])


def _alone(target: Sequence[int], start: Sequence[int]) -> TargetRow:
    return TargetRow([*start, *target], [*[IGNORED] * len(start), *target])


def measure_pairs(rater: Rater, pairs: Sequence[Pair]) -> list[Measured]:
    """Returns per pair ``loss`` and ``loss_alone``, the mean of its targets' tokens in nats, and ``scored_tokens``.

    Raises:
        UnscorableError: A pair has no token that can be scored.
    """
    given = _sums(rater, [pair.given for pair in pairs])
    alone = _sums(rater, [pair.alone for pair in pairs])
    measured: list[Measured] = []
    for with_context, without in zip(given, alone, strict=True):
        if not with_context.tokens:
            raise UnscorableError("the text to score is empty")
        if with_context.tokens != without.tokens:
            raise RuntimeError(f"{with_context.tokens} tokens in context, {without.tokens} alone")
        measured.append(
            {
                "loss": with_context.total / with_context.tokens,
                "loss_alone": without.total / without.tokens,
                "scored_tokens": with_context.tokens,
            }
        )
    return measured


def _sums(rater: Rater, groups: Sequence[Sequence[TargetRow]]) -> list[Loss]:
    losses = iter(rater.losses([row for group in groups for row in group]))
    return [sum((next(losses) for _ in group), Loss(0.0, 0)) for group in groups]
