"""The gradient of chosen entries of a linear layer's weight, computed in whichever way is fastest here.

``dense`` forms the whole ``g^T x`` and picks from it; ``sampled`` lets ``torch.sparse.sampled_addmm`` compute only the
pattern; ``gather`` multiplies the columns that belong to each entry. Which wins depends on density, dtype and machine.
"""

# Legend: T tokens (all leading dimensions), N in_features, M out_features, K chosen entries

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from finetune.core.measured import measured_choice

__all__ = ["BACKENDS", "EntryPattern", "fastest_backend"]

_CHUNK = 4096
"""Entries whose products exist at a time in the ``gather`` backend."""
_NOMINAL_TOKENS = 128
_ROUNDS = 3


@dataclass(frozen=True)
class EntryPattern:
    """Chosen entries of an (M, N) matrix.

    Attributes:
        index: Flat row-major positions, ascending, int32 or int64 (K,).
        rows: M.
        columns: N.
    """

    index: Tensor
    rows: int
    columns: int

    @functools.cached_property
    def row(self) -> Tensor:
        """Row of each entry, of the index's dtype (K,)."""
        return self.index // self.columns

    @functools.cached_property
    def column(self) -> Tensor:
        """Column of each entry, of the index's dtype (K,)."""
        return self.index % self.columns

    @functools.cached_property
    def zeros(self) -> Tensor:
        """A float32 CSR matrix (M, N) with a stored zero at each entry."""
        starts = torch.arange(self.rows + 1, device=self.index.device, dtype=self.index.dtype) * self.columns
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(
                torch.searchsorted(self.index, starts),
                self.column.long(),
                torch.zeros(self.index.numel(), device=self.index.device),
                (self.rows, self.columns),
                check_invariants=False,
            )


def _dense(grad_TM: Tensor, x_TN: Tensor, pattern: EntryPattern) -> Tensor:
    return (grad_TM.t() @ x_TN).reshape(-1).index_select(0, pattern.index)


def _sampled(grad_TM: Tensor, x_TN: Tensor, pattern: EntryPattern) -> Tensor:
    product: Tensor = torch.sparse.sampled_addmm(pattern.zeros, grad_TM.t().float(), x_TN.float(), beta=0.0)
    values: Tensor = product.values()
    return values


def _gather(grad_TM: Tensor, x_TN: Tensor, pattern: EntryPattern) -> Tensor:
    grad_MT, x_NT = grad_TM.t().contiguous(), x_TN.t().contiguous()
    out_K = torch.empty(pattern.index.numel(), device=grad_TM.device, dtype=torch.float32)
    for start in range(0, out_K.numel(), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        products = grad_MT.index_select(0, pattern.row[chunk]) * x_NT.index_select(0, pattern.column[chunk])
        torch.sum(products, dim=1, dtype=torch.float32, out=out_K[chunk])
    return out_K


BACKENDS: dict[str, Callable[[Tensor, Tensor, EntryPattern], Tensor]] = {
    "dense": _dense,
    "sampled": _sampled,
    "gather": _gather,
}
"""Name -> function of the output's gradient (T, M), the input (T, N) and a pattern, that returns the gradient (K,)."""


@functools.cache
def fastest_backend(rows: int, columns: int, entries: int, dtype: torch.dtype, device: torch.device) -> str:
    """Returns the name of the backend that is fastest for a matrix of that size, by trying each, once per machine.

    Args:
        rows: M.
        columns: N.
        entries: About K: pass powers of two, so that matrices of like density share one measurement.
        dtype: Dtype of the products.
        device: Where they are computed. On a GPU the dense product is taken untried: tensor cores win by far.
    """
    if device.type != "cpu":
        return "dense"
    question = f"gradient of {entries} entries of {rows} x {columns} {dtype}"
    return measured_choice(question, lambda: _measure(rows, columns, entries, dtype))


def _measure(rows: int, columns: int, entries: int, dtype: torch.dtype) -> str:
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(_NOMINAL_TOKENS, rows, generator=generator).to(dtype)
    x = torch.randn(_NOMINAL_TOKENS, columns, generator=generator).to(dtype)
    index = torch.randint(rows * columns, (min(entries, rows * columns),), generator=generator)
    pattern = EntryPattern(torch.unique(index).int(), rows, columns)
    names = [name for name in BACKENDS if name != "sampled" or dtype == torch.float32]

    def seconds(name: str) -> float:
        start = time.perf_counter()
        BACKENDS[name](grad, x, pattern)
        return time.perf_counter() - start

    for name in names:
        seconds(name)  # warms up
    once = {name: seconds(name) for name in names}
    # Where one is out of the question (a CPU that emulates bfloat16), it is not tried again.
    close = [name for name in names if once[name] <= 2 * min(once.values())]
    rounds = {name: [once[name]] for name in close}
    for _ in range(_ROUNDS - 1 if len(close) > 1 else 0):
        for name in close:
            rounds[name].append(seconds(name))
    return min(close, key=lambda name: statistics.median(rounds[name]))
