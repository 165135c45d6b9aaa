"""Looks at what a model does on a few batches before training, without training it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from finetune.core.errors import DataError
from finetune.core.evaluation_mode import evaluation_mode

__all__ = ["Batches", "run_batches", "single_examples", "watch_gradients", "watch_inputs"]

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


@torch.no_grad()
def watch_inputs(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Batches, receive: Callable[[str, Tensor], None]
) -> None:
    """Calls ``receive(name, x)`` with what each layer takes in, (T, N): all tokens of a batch that are no padding.

    Args:
        model: A causal LM.
        layers: Name -> module of ``model`` whose first argument is (B, T, N).
        batches: What the model takes, on any device.
        receive: Gets tensors that live for the call only.
    """
    mask: Tensor | None = None
    handles = []
    for name, layer in layers.items():

        def look(module: nn.Module, args: Any, name: str = name) -> None:
            receive(name, args[0].flatten(0, -2) if mask is None else args[0][mask])

        handles.append(layer.register_forward_pre_hook(look))
    try:
        with evaluation_mode(model):
            for batch in _moved(model, batches):
                mask = None if batch.get("attention_mask") is None else batch["attention_mask"].bool()
                model(**{**batch, "labels": None})
    finally:
        for handle in handles:
            handle.remove()


def run_batches(
    model: Any,
    batches: Batches | Iterator[Mapping[str, Any]],
    loss_of: Callable[[Mapping[str, Any]], Tensor | None] | None = None,
) -> Iterator[Tensor]:
    """Yields the loss of each batch, in evaluation mode and without a cache: the model's own, or ``loss_of`` the batch.

    Raises:
        DataError: A loss is not finite.
    """
    with evaluation_mode(model):
        for number, batch in enumerate(_moved(model, batches), 1):
            loss = model(**batch).loss if loss_of is None else loss_of(batch)
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
            lists = {key: value[row : row + 1] for key, value in batch.items() if isinstance(value, list)}
            yield {**batch, **lists, **own}


def _moved(model: nn.Module, batches: Batches | Iterator[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the batches on the model's device, with a bar where somebody watches: there may be many."""
    device = next(model.parameters()).device
    console = Console(stderr=True)
    for batch in track(batches, "choosing", transient=True, console=console, disable=not console.is_terminal):
        moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        yield {"use_cache": False, **moved}
