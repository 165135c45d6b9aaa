"""What the pages of selections and reflections have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["counted_reasons", "created_in_words", "fact_groups"]


def created_in_words(manifest: Mapping[str, Any]) -> str:
    """Returns when a manifest was written: ``2026-12-03 09:29:10 UTC``."""
    return str(manifest["created"]).replace("T", " ").replace("+00:00", " UTC")


def counted_reasons(*counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns why rows were left out, and how many, the commonest reason first."""
    rows = [(reason, count) for part in counts for reason, count in part.items()]
    return [(reason, f"{count:,}") for reason, count in sorted(rows, key=lambda row: -row[1])]


def fact_groups(groups: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns titled groups of facts as text, without what is not known."""
    found = [
        (title, [(key, str(v)) for key, v in facts.items() if v not in (None, "")]) for title, facts in groups.items()
    ]
    return [(title, facts) for title, facts in found if facts]
