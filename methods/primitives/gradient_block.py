"""The part of a gradient that can hold large entries, found in one pass, or from its two factors alone.

No entry of ``g^T x`` is larger than the norms of its two vectors multiplied (Cauchy and Schwarz), and a few tokens and
channels carry most of a gradient: mostly a small block is all that has to be computed to know the largest entries
exactly. Where the whole is there, one pass that looks at many entries together leaves little to score.
"""

# Legend: T tokens (all leading dimensions), N in_features, M out_features, R and C rows and columns of the block

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["GradientBlock", "block_in_reach", "columns_in_reach"]

_ROUNDING = 0.99
"""A 16-bit product may be larger than the norms allow, by its rounding."""
_ROWS = 64
"""Entries of a whole gradient that are looked at together: it divides the size of almost every weight."""


@dataclass(frozen=True)
class GradientBlock:
    """Some rows and some columns of an (M, N) matrix; vectors over it are row-major.

    Attributes:
        rows: int64 ascending (R,).
        columns: int64 ascending (C,).
        shape: (M, N).
    """

    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]

    @property
    def share(self) -> float:
        """Its share of the matrix."""
        return self.rows.numel() * self.columns.numel() / (self.shape[0] * self.shape[1])

    def product(self, grad_TM: Tensor, x_TN: Tensor) -> Tensor:
        """Returns the block of ``grad^T x`` (R C,)."""
        return (grad_TM.index_select(1, self.rows).t() @ x_TN.index_select(1, self.columns)).reshape(-1)

    def of(self, matrix: Tensor) -> Tensor:
        """Returns the block (R C,) of M N entries, of any shape that lies row-major."""
        block = matrix.view(self.shape)
        if self.columns.numel() < self.shape[1]:
            block = block.index_select(1, self.columns)
        if self.rows.numel() < self.shape[0]:
            block = block.index_select(0, self.rows)
        return block.reshape(-1)

    def positions(self) -> Tensor:
        """Returns the flat position in the matrix of each place in the block, int64 ascending (R C,)."""
        return (self.rows[:, None] * self.shape[1] + self.columns).reshape(-1)

    def places(self, index: Tensor) -> Tensor:
        """Returns the places in the block, int64, of those of the flat positions ``index`` that lie in it."""
        row = _place(self.rows, self.shape[0])[index // self.shape[1]]
        column = _place(self.columns, self.shape[1])[index % self.shape[1]]
        inside = (row >= 0) & (column >= 0)
        return (row * self.columns.numel() + column)[inside]


def block_in_reach(grad_TM: Tensor, x_TN: Tensor, least: Tensor) -> GradientBlock:
    """Returns a block outside of which every entry of ``grad^T x`` is smaller than ``least``.

    What is not finite lies in the block.
    """
    rows, columns = _column_norms(grad_TM), _column_norms(x_TN)
    least = least * _ROUNDING
    return GradientBlock(
        _not_below(rows * columns.max(), least),
        _not_below(columns * rows.max(), least),
        (rows.numel(), columns.numel()),
    )


def columns_in_reach(gradient: Tensor, least: Tensor) -> GradientBlock:
    """Returns a block of a whole gradient, cut into rows of any length, outside of which all is smaller than ``least``.

    Args:
        gradient: Any dtype (n,).
        least: float32 (). What is not finite lies in the block.
    """
    rows = 1 if gradient.numel() % _ROWS else _ROWS
    table = gradient.view(rows, -1)
    # Over the first dimension: CPUs take a 16-bit maximum twice as fast there as over the last.
    return GradientBlock(
        torch.arange(rows, device=gradient.device),
        _not_below(table.abs().amax(0), least * _ROUNDING),
        (rows, table.shape[1]),
    )


def _column_norms(matrix: Tensor) -> Tensor:
    # Eight times faster on CPUs than torch.linalg.vector_norm over the first dimension. Squaring the copy in place
    # spares fresh memory, which takes longer to map than to fill.
    wide = matrix.float()
    return (wide.square() if wide is matrix else wide.square_()).sum(0).sqrt()


def _not_below(size: Tensor, least: Tensor) -> Tensor:
    # Not ">=": NaN has to stay.
    return (~(size < least)).nonzero().reshape(-1)


def _place(chosen: Tensor, size: int) -> Tensor:
    """Returns the place of each of ``size`` numbers among the chosen ones, -1 where it is not one of them."""
    place = torch.full((size,), -1, device=chosen.device)
    place[chosen] = torch.arange(chosen.numel(), device=chosen.device)
    return place
