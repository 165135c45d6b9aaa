"""Sequences that begin alike, computed together: their common tokens are a trunk, the rest of each a branch.

One row of a batch holds a trunk and its branches one after the other. A branch attends to the trunk and to itself, at
the positions that it would have alone, so each branch comes out as if its whole sequence had been computed.

Legend: B trees, T tokens of the longest tree, N branches of all trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["TokenTree", "TreeBatch", "grow_tree", "tree_batch"]


@dataclass(frozen=True)
class TokenTree:
    """Sequences with a common beginning.

    Attributes:
        trunk: The tokens that all begin with; it may be empty.
        branches: What follows in each, at least one token.
    """

    trunk: Sequence[int]
    branches: Sequence[Sequence[int]]

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return len(self.trunk) + sum(map(len, self.branches))


def grow_tree(sequences: Sequence[Sequence[int]]) -> TokenTree:
    """Returns the tree of whole sequences of token ids.

    The trunk is found among tokens, not in the text: whatever a tokenizer merges where two texts meet, every branch
    continues to its own sequence, token for token.
    """
    shortest = min(map(len, sequences))
    common = 0
    while common < shortest - 1 and all(sequence[common] == sequences[0][common] for sequence in sequences):
        common += 1
    return TokenTree(sequences[0][:common], [sequence[common:] for sequence in sequences])


@dataclass(frozen=True)
class TreeBatch:
    """Trees as a model takes them.

    Attributes:
        ids: int64 (B, T).
        positions: int64 (B, T).
        mask: (B, 1, T, T) in the model's dtype: 0 where a token attends, the most negative number elsewhere.
        end_rows: int64 (N,), the row of each branch.
        end_positions: int64 (N,), the place of its last token in the row.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    end_rows: Tensor
    end_positions: Tensor


def tree_batch(trees: Sequence[TokenTree], dtype: torch.dtype, device: Any) -> TreeBatch:
    """Lays trees out side by side, padded on the right."""
    import torch

    longest = max(tree.tokens for tree in trees)
    ids = torch.zeros(len(trees), longest, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    branch = torch.full_like(ids, -1)  # 0 is the trunk, -1 padding
    ends = []
    for row, tree in enumerate(trees):
        start = 0
        for number, part in enumerate((tree.trunk, *tree.branches)):
            stop = start + len(part)
            before = len(tree.trunk) if number else 0
            ids[row, start:stop] = torch.tensor(part, dtype=torch.int64)
            positions[row, start:stop] = torch.arange(before, before + len(part))
            branch[row, start:stop] = number
            start = stop
            if number:
                ends.append((row, stop - 1))
    branch = branch.to(device)
    same = (branch[:, None, :] == branch[:, :, None]) | (branch[:, None, :] == 0)
    allowed = same & torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, torch.finfo(dtype).min)
    end_rows, end_positions = torch.tensor(ends, device=device).unbind(1)
    return TreeBatch(ids.to(device), positions.to(device), mask[:, None], end_rows, end_positions)
