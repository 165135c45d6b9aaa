"""Scores many weights: one per thread at a time, each read when its turn comes and dropped when it is scored."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from finetune.core.files import cache_folder, read_cached, write_json
from finetune.methods.primitives.module_types import ranked
from finetune.methods.primitives.signal_to_noise import (
    Threshold,
    gram_matrix,
    require_scorable,
    roots_of_gram,
    signal_to_noise,
)

__all__ = ["cached_scan", "scan_weights"]

_NEARLY_EQUAL = 1e-3
"""Relative difference of two scores that float32 products may have the wrong way round."""


def scan_weights(
    weights: Mapping[str, Callable[[], Tensor]],
    *,
    threshold: Threshold = "spectrum",
    progress: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Returns the signal-to-noise ratio of each module.

    Products are formed in float32; where the scores of two modules of one type come out nearly equal, both are formed
    again in float64, so that their order is right.

    Args:
        weights: Module name -> what reads its weight: (n, m), or (E, n, m) for E experts, whose score is the mean of
            those that are finite, infinite if none is.
        threshold: What counts as signal.
        progress: Called after each module.

    Raises:
        TargetError: A weight is zero or not finite; the error names it.
    """

    @torch.no_grad()
    def score(name: str, *, precise: bool) -> float:
        weight = weights[name]()
        require_scorable(name, weight)
        rows, columns = weight.shape[-2:]
        slices = list(weight) if weight.ndim == 3 else [weight]
        del weight
        found = []
        while slices:
            # A matrix is gone before its eigenvalues are computed, which takes two of its product's size.
            gram = gram_matrix(slices.pop(), precise=precise)
            found.append(signal_to_noise(roots_of_gram(gram), rows, columns, threshold))
        finite = [value for value in found if math.isfinite(value)]
        return sum(finite) / len(finite) if finite else math.inf

    def first(name: str) -> float:
        value = score(name, precise=False)
        progress()
        return value

    with _one_matrix_per_thread() as pool:
        scores = dict(zip(weights, pool.map(first, weights), strict=True))
        unsettled = _nearly_equal(scores)
        scores |= dict(zip(unsettled, pool.map(lambda name: score(name, precise=True), unsettled), strict=True))
    return scores


def cached_scan(
    weights: Mapping[str, Callable[[], Tensor]],
    *,
    threshold: Threshold = "spectrum",
    progress: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Returns what :func:`scan_weights` does, kept in the cache folder under the hash of the weights' contents."""
    with _one_matrix_per_thread() as pool:
        digests = pool.map(lambda name: _digest(name, weights[name]()), weights)
        key = hashlib.sha256("".join([threshold, *digests]).encode()).hexdigest()[:32]
    path = cache_folder() / "scans" / f"{key}.json"
    known = read_cached(path)
    if list(known) == list(weights):
        for _ in known:
            progress()
        return known
    scores = scan_weights(weights, threshold=threshold, progress=progress)
    # Where the cache cannot be written, the next run scans again.
    with contextlib.suppress(OSError):
        write_json(path, scores)
    return scores


def _digest(name: str, weight: Tensor) -> str:
    digest = hashlib.sha256(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
    digest.update(weight.contiguous().view(-1).cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def _one_matrix_per_thread() -> Iterator[ThreadPoolExecutor]:
    """Several matrices at a time use the cores better than several threads on one."""
    threads = torch.get_num_threads()

    def begin() -> None:
        torch.set_num_threads(1)

    try:
        with ThreadPoolExecutor(max_workers=threads, initializer=begin) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _nearly_equal(scores: Mapping[str, float]) -> list[str]:
    """Returns the modules whose score is nearly that of a neighbour in the ranking of their type."""
    found: dict[str, None] = {}
    for names in ranked(scores).values():
        for higher, lower in itertools.pairwise(names):
            if math.isfinite(scores[higher]) and scores[higher] - scores[lower] < _NEARLY_EQUAL * scores[higher]:
                found |= dict.fromkeys((higher, lower))
    return list(found)
