"""Looks at what a model does on a few batches before training, without training it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from finetune.core.errors import DataError

__all__ = ["run_batches", "single_examples", "watch_gradients"]

Batches = Collection[Mapping[str, Any]]
"""What a model takes, batch by batch; may be gone through several times."""


def watch_gradients(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    batches: Batches | Iterator[Mapping[str, Any]],
    receive: Callable[[str, Tensor], None],
) -> None:
    """Calls ``receive(name, gradient)`` for each parameter after the backward pass of each batch's mean loss.

    One dense gradient is alive at a time: it is dropped when ``receive`` returns. The model is in evaluation mode
    meanwhile, and left as it was.

    Args:
        model: A causal LM.
        parameters: Name -> parameter of ``model``.
        batches: What the model takes, labels included, on any device.
        receive: Gets gradients of the parameter's shape and dtype.

    Raises:
        DataError: The loss of a batch is not finite: it has no labels, for example.
    """
    wanted = [parameter.requires_grad for parameter in parameters.values()]
    handles = []
    for name, parameter in parameters.items():

        def hand_over(leaf: Tensor, name: str = name) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            receive(name, gradient)

        parameter.requires_grad_(True)
        handles.append(parameter.register_post_accumulate_grad_hook(hand_over))  # type: ignore[no-untyped-call]
    try:
        for loss in run_batches(model, batches):
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
        for parameter, trained in zip(parameters.values(), wanted, strict=True):
            parameter.requires_grad_(trained)


def run_batches(model: Any, batches: Batches | Iterator[Mapping[str, Any]]) -> Iterator[Tensor]:
    """Yields the loss of each batch, in evaluation mode and without a cache.

    Raises:
        DataError: A loss is not finite.
    """
    device = next(model.parameters()).device
    with _evaluating(model):
        # A bar where somebody watches: this may take as long as some epochs.
        watched = sys.stderr.isatty()
        bar = track(batches, "choosing", transient=True, console=Console(stderr=True), disable=not watched)
        for number, batch in enumerate(bar, 1):
            moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
            loss = model(**{"use_cache": False, **moved}).loss
            if loss is None or not bool(torch.isfinite(loss)):
                raise DataError(
                    "the loss of a calibration batch is not finite",
                    where=f"batch {number}",
                    got="no labels" if loss is None else str(loss.item()),
                    want="labels that are not all -100",
                )
            yield loss


def single_examples(batches: Batches) -> Iterator[dict[str, Any]]:
    """Yields the rows of all batches as batches of one, without the padding at their end."""
    for batch in batches:
        tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
        rows = len(next(iter(tensors.values())))
        mask = batch.get("attention_mask")
        for row in range(rows):
            stop = None if mask is None else int(mask[row].nonzero().max()) + 1
            own = {key: value[row : row + 1, :stop] for key, value in tensors.items()}
            yield {**batch, **own}


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
