"""Which rows are measured together."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.models.batches import by_length

__all__ = ["plan_batches"]


def plan_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Returns the positions of the rows in batches of similar length, longest first.

    The plan depends on the rows alone, never on what was done before or by how many processes: so a row is always
    measured among the same rows, and its score is the same to the last bit after a restart.

    Args:
        lengths: Tokens of each row.
        max_tokens: Rows times tokens of the longest one, at most; a longer row is a batch by itself.
    """
    batches: list[list[int]] = []
    room = 0
    for position in by_length(lengths):
        if room == 0:
            batches.append([])
            room = max(1, max_tokens // max(1, lengths[position]))
        batches[-1].append(position)
        room -= 1
    return batches
