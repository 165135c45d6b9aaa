"""Why rows came to nothing, in a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from finetune.data_selection.engine.failures import FAILURES

__all__ = ["reasons_in_words", "what_helps"]


def reasons_in_words(rows: Sequence[tuple[str, str]]) -> str:
    """Returns how many rows have each reason, the commonest first, each with what is special to its first row.

    Args:
        rows: Reason and detail of each.
    """
    details = dict(reversed(rows))
    said = [
        f"{count:,} {reason}" + (f" ({details[reason]})" if details[reason] else "")
        for reason, count in Counter(reason for reason, _ in rows).most_common()
    ]
    return ", ".join(said)


def what_helps(rows: Sequence[tuple[str, str]], otherwise: str) -> str:
    """Returns what to do about it: to go on, where rows were not to blame, or else what is given."""
    return "--resume, once that has changed" if any(reason in FAILURES for reason, _ in rows) else otherwise
