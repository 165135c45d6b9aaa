"""Rows that say the same: clusters of which one row is kept, that which ranks highest."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

from finetune.data_selection.pool import Example

__all__ = ["DuplicateFilter", "bands", "exact_clusters", "near_clusters", "normalized_text", "shingles"]

_WORDS, _PERMUTATIONS = 5, 128
_FOUND = 0.9
"""Share of the pairs with just the threshold's likeness that are looked at."""


def normalized_text(example: Example) -> str:
    """Returns all that is said in a row, in lower case, compatibility forms unified, white space collapsed."""
    row = example.conversation
    said = "\n".join(message.content for message in row.messages) or row.text
    return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", said).lower()).strip()


def shingles(text: str) -> frozenset[str]:
    """Returns the five-word sequences of a text; of one with fewer words, or without spaces, five-letter ones."""
    words = text.split()
    pieces = words if len(words) >= _WORDS else list(text)
    join = " " if len(words) >= _WORDS else ""
    count = max(1, len(pieces) - _WORDS + 1)
    return frozenset(join.join(pieces[start : start + _WORDS]) for start in range(count))


def exact_clusters(texts: Sequence[str]) -> list[int]:
    """Returns for each text the position of the first one that equals it."""
    first: dict[str, int] = {}
    return [first.setdefault(text, position) for position, text in enumerate(texts)]


def near_clusters(texts: Sequence[str], threshold: float) -> list[int]:
    """Returns for each text the lowest position in its cluster.

    Two texts are in one cluster if they, or texts between them in a chain, have at least ``threshold`` of their
    shingles in common (Jaccard). MinHash finds the pairs to look at; every one is verified on the shingles themselves.

    Args:
        texts: Normalised texts.
        threshold: In (0, 1].
    """
    sets = [shingles(text) for text in texts]
    clusters = list(range(len(texts)))

    def root(position: int) -> int:
        while clusters[position] != position:
            clusters[position] = clusters[clusters[position]]
            position = clusters[position]
        return position

    for one, other in _candidates(sets, threshold):
        low, high = sorted((root(one), root(other)))
        if low != high and len(sets[one] & sets[other]) >= threshold * len(sets[one] | sets[other]):
            clusters[high] = low
    return [root(position) for position in range(len(texts))]


def _candidates(sets: Sequence[frozenset[str]], threshold: float) -> Iterator[tuple[int, int]]:
    """Yields the pairs of positions whose MinHashes share a band."""
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(num_perm=_PERMUTATIONS, params=bands(threshold))
    for position, found in enumerate(sets):
        sketch = MinHash(num_perm=_PERMUTATIONS)
        sketch.update_batch([shingle.encode() for shingle in sorted(found)])
        yield from ((int(other), position) for other in sorted(index.query(sketch)))
        index.insert(position, sketch)


def bands(threshold: float) -> tuple[int, int]:
    """Returns how many bands the 128 MinHashes are cut into, and the MinHashes of each.

    Two texts with a share s of common shingles have one of b bands of r MinHashes in common with probability
    ``1 - (1 - s^r)^b``. Every pair is verified, so bands are as long as lets nine in ten through at the threshold.
    """
    for length in range(_PERMUTATIONS // 2, 1, -1):
        count = _PERMUTATIONS // length
        if 1 - (1 - threshold**length) ** count >= _FOUND:
            return count, length
    return _PERMUTATIONS, 1


class DuplicateFilter:
    """Refuses a row whose cluster has a row that was chosen before.

    Args:
        clusters: For each row of the pool the name of its cluster.
    """

    def __init__(self, clusters: Sequence[int]) -> None:
        self._clusters = clusters
        self._taken: set[int] = set()

    def refuses(self, position: int) -> str:
        """Returns why the row at ``position`` is not to be chosen, or nothing."""
        return "the same as a row that ranks higher" if self._clusters[position] in self._taken else ""

    def take(self, position: int) -> None:
        """Counts the row at ``position`` as chosen."""
        self._taken.add(self._clusters[position])
