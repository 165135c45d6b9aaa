"""Rows that share a run of words with what models are measured on: to train on them makes the measurement worthless."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Contamination", "texts_in"]


class Contamination:
    """Knows every run of words in the evaluation texts.

    Words are compared in lower case without punctuation, so a question in another template is found. A text with fewer
    words than a run has none.

    Args:
        texts: The evaluation texts.
        length: Words of a run; 13 is usual (arXiv 2005.14165, appendix C).
    """

    def __init__(self, texts: Iterable[str], length: int = 13) -> None:
        self._length = length
        self._runs = {run for text in texts for run in self._runs_of(text)}

    def __call__(self, texts: Iterable[str]) -> str:
        """Returns why a row with such texts is left out, or nothing."""
        found = any(run in self._runs for text in texts for run in self._runs_of(text))
        return f"shares {self._length} words in a row with an evaluation text" if found else ""

    def _runs_of(self, text: str) -> Iterator[str]:
        words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).lower())
        return (" ".join(words[at : at + self._length]) for at in range(len(words) - self._length + 1))


def texts_in(value: Any) -> Iterator[str]:
    """Yields every text in a row, in whatever columns, lists and mappings it stands."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from texts_in(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from texts_in(part)
