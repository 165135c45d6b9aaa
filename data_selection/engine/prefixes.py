"""Families of sequences that begin alike: the beginning is computed once where the model allows it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from finetune.core.errors import FinetuneWarning
from finetune.data_selection.engine.trees import grow_tree

if TYPE_CHECKING:
    from torch import Tensor

    from finetune.data_selection.engine.rater import Rater

__all__ = ["can_share", "last_hidden"]

T = TypeVar("T")

_TREE_TOKENS = 1024
"""A family with more tokens becomes several trees: attention among all tokens of a tree is computed and then masked."""
_TOKENS_AT_A_TIME = 8192
_TOLERANCE = {"float32": 1e-3, "float64": 1e-6}
"""Largest difference between final hidden states, relative to their size, by dtype; half precision: a tenth."""


def last_hidden(rater: Rater, families: Sequence[Sequence[list[int]]], *, shared: bool) -> Tensor:
    """Returns the final hidden state of the last token of each sequence, family by family.

    Args:
        rater: The model.
        families: Sequences of token ids; those of a family are expected to begin alike.
        shared: Whether what they have in common is computed once, as :func:`can_share` says.

    Shape:
        (sequences of all families, D) in the model's dtype.
    """
    import torch

    if not shared:
        sequences = [sequence for family in families for sequence in family]
        return torch.cat([rater.last_hidden(part) for part in _portions(sequences, [len(row) for row in sequences])])
    trees = [grow_tree(part) for family in families for part in _parts(family)]
    return torch.cat([rater.last_hidden_of_trees(part) for part in _portions(trees, [tree.tokens for tree in trees])])


def can_share(rater: Rater, families: Sequence[Sequence[list[int]]]) -> bool:
    """Returns whether ``rater`` gives the same hidden states when beginnings are shared; if not, a warning says why.

    Models whose layers are not all full attention see another past than a tree gives them, also where a short probe
    does not show it; for the others a probe decides.

    Args:
        rater: The model.
        families: Some families to try.
    """
    config = rater.model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        reason = f"its attention is {', '.join(sorted(kinds - {'full_attention'})) or 'that of a sliding window'}"
    elif rater.model.config._attn_implementation not in ("sdpa", "eager"):
        reason = f"its attention is computed by {rater.model.config._attn_implementation}"
    else:
        plain, tree = (last_hidden(rater, families, shared=shared).float() for shared in (False, True))
        error = float((plain - tree).norm(dim=1).max() / plain.norm(dim=1).min())
        if error < _TOLERANCE.get(str(rater.model.dtype).removeprefix("torch."), 0.1):
            return True
        reason = f"that changes its hidden states by {error:.1%}"
    name = rater.name or type(rater.model).__name__
    warnings.warn(
        f"prefixes are not shared in {name}, since {reason}, so scoring takes longer",
        FinetuneWarning,
        stacklevel=2,
    )
    return False


def _parts(family: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Yields the family in parts whose trees are not too large."""
    common = len(grow_tree(family).trunk)
    part: list[list[int]] = []
    tokens = common
    for sequence in family:
        if part and tokens + len(sequence) - common > _TREE_TOKENS:
            yield part
            part, tokens = [], common
        part.append(sequence)
        tokens += len(sequence) - common
    yield part


def _portions(items: Sequence[T], lengths: Sequence[int]) -> Iterator[list[T]]:
    """Yields items in portions that take little enough memory when padded to their longest."""
    portion: list[T] = []
    longest = 0
    for item, length in zip(items, lengths, strict=True):
        longest = max(longest, length)
        if portion and (len(portion) + 1) * longest > _TOKENS_AT_A_TIME:
            yield portion
            portion, longest = [], length
        portion.append(item)
    yield portion
