"""Which attention heads and feed-forward channels of a model train: scores, quotas, and the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from finetune.core.errors import TargetError
from finetune.methods.primitives.calibration import Batches, watch_gradients, watch_inputs
from finetune.methods.primitives.weight_slice import oriented_weight

__all__ = ["UnitScore", "even_counts", "rank_units", "unit_scores"]

UnitScore = Literal["random", "weight", "activation", "product", "gradient"]


def even_counts(sizes: Sequence[int], share: float, generator: torch.Generator) -> list[int]:
    """Returns how many units train of each layer: their total is ``share`` of all, rounded; layers differ by one.

    Args:
        sizes: Units of each layer.
        share: In [0, 1].
        generator: Decides which layers get one more.
    """
    wanted = [share * size for size in sizes]
    counts = [int(number) for number in wanted]
    total = min(sum(sizes), max(1, round(sum(wanted)))) if share > 0 else 0
    spare = torch.randperm(len(sizes), generator=generator).tolist()
    for position in spare[: max(0, total - sum(counts))]:
        counts[position] += 1
    return counts


def rank_units(scores: Tensor | None, size: int, *, pick: str, generator: torch.Generator) -> Tensor:
    """Returns the units of a layer in the order in which they are taken, int64 (size,).

    Args:
        scores: One per unit, or None for a random order.
        size: Number of units.
        pick: ``largest`` or ``smallest`` scores first; of equal ones the first.
        generator: Draws the random order.
    """
    if scores is None:
        return torch.randperm(size, generator=generator)
    return scores.argsort(descending=pick == "largest", stable=True).cpu()


def unit_scores(
    model: nn.Module, widths: Mapping[str, int], score: UnitScore, calibration: Batches | None
) -> dict[str, Tensor]:
    """Returns the score of each head or channel, float32 (units,), by the layer whose columns belong to it.

    ``weight`` is the norm of a unit's columns of the weight; ``activation`` that of its inputs over all tokens that are
    no padding; ``product`` both multiplied; ``gradient`` that of its columns' gradients, over all batches.

    Args:
        model: The model, as it was loaded.
        widths: Layer name -> columns of one unit (the head's width, or 1).
        score: Which.
        calibration: Batches to look at; None for ``weight``.

    Raises:
        TargetError: A score of weights is asked of weights that cannot be read.
    """
    layers = {name: model.get_submodule(name) for name in widths}
    squares = _squares(model, layers, score, calibration or [])
    return {name: columns.reshape(-1, widths[name]).sum(1).sqrt() for name, columns in squares.items()}


def _squares(model: Any, layers: dict[str, nn.Module], score: UnitScore, calibration: Batches) -> dict[str, Tensor]:
    """Returns the squared score of each column."""
    if score == "activation":
        return _input_squares(model, layers, calibration)
    for name, layer in layers.items():
        if not oriented_weight(layer).is_floating_point():
            raise TargetError(
                f"select: {score} reads the weights, and these are quantised",
                where=name,
                fix="method.select: random or activation",
            )
    if score == "gradient":
        return _gradient_squares(model, layers, calibration)
    weights = {name: oriented_weight(layer).detach().float().square().sum(0) for name, layer in layers.items()}
    if score == "weight":
        return weights
    inputs = _input_squares(model, layers, calibration)
    return {name: columns * inputs[name] for name, columns in weights.items()}


def _input_squares(model: Any, layers: dict[str, nn.Module], calibration: Batches) -> dict[str, Tensor]:
    squares: dict[str, Tensor] = {}

    def receive(name: str, x_TN: Tensor) -> None:
        own = x_TN.float().square().sum(0)
        squares[name] = squares[name] + own if name in squares else own

    watch_inputs(model, layers, calibration, receive)
    return squares


def _gradient_squares(model: Any, layers: dict[str, nn.Module], calibration: Batches) -> dict[str, Tensor]:
    squares: dict[str, Tensor] = {}

    def receive(name: str, gradient: Tensor) -> None:
        as_rows = oriented_weight(layers[name]) is layers[name].weight  # Conv1D stores in x out
        own = gradient.float().square().sum(0 if as_rows else 1)
        squares[name] = squares[name] + own if name in squares else own

    weights: dict[str, nn.Parameter] = {name: layer.weight for name, layer in layers.items()}  # type: ignore[misc]
    watch_gradients(model, weights, calibration, receive)
    return squares
