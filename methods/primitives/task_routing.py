"""Which task each row of a batch belongs to, and with which weights a task mixes the skills.

``w[s, k] = sigmoid(Z[s, k]) / (sum_k' sigmoid(Z[s, k']) + 1e-12)``: independent sigmoids, normalised (Ponti et al.,
arXiv 2202.13914, section 3; Caccia et al., arXiv 2211.03831, section 3).
"""

# Legend: U different tasks of a batch, R routers, S splits, K skills, N rows

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from finetune.core.errors import DataError, list_choices, nearest
from finetune.methods.primitives.carried import Carried

__all__ = ["ROUTING", "UNKNOWN", "Batch", "Routing", "gates", "mixing_weights", "place_tasks"]

UNKNOWN = -1
"""In place of a task's number where all skills are mixed alike."""
_LEAST = 1e-12


@dataclass(frozen=True)
class Batch:
    """Tasks of a batch.

    Attributes:
        tasks: Numbers of the different ones, int64 (U,).
        inverse: Each row's place among them, int64 (N,).
    """

    tasks: Tensor
    inverse: Tensor


@dataclass
class Routing:
    """How one forward pass mixes the skills of an adapter.

    Attributes:
        batch: The tasks of its rows.
        weights: What all routers say, (U, R, S, K); None where each layer computes its own router's.
        noise: What was drawn beside the logits, of the same shape.
    """

    batch: Batch
    weights: Tensor | None
    noise: Tensor | None


ROUTING: Carried[Mapping[str, Routing]] = Carried("routing")
"""Of the pass that is under way, by adapter."""


def place_tasks(names: Sequence[str], known: Sequence[str], *, unknown: str, device: torch.device) -> Batch:
    """Returns the tasks of a batch by their numbers.

    Args:
        names: Task of each row.
        known: Names of the tasks that there are.
        unknown: ``error`` or ``uniform``: what happens to a name that is none of them.
        device: Where the numbers are needed; the host does not wait for it.

    Raises:
        DataError: A task is unknown, and that is an error.
    """
    different = list(dict.fromkeys(names))
    numbers = []
    for name in different:
        if name not in known and unknown == "error":
            raise DataError(
                f"unknown task {name!r}",
                where="tasks",
                want=list_choices(known),
                near=nearest(name, known),
                fix="the name of a task that was trained (of a task file: its key `task`), or unknown_task: uniform, "
                "which mixes all skills alike",
            )
        numbers.append(known.index(name) if name in known else UNKNOWN)
    places = {name: place for place, name in enumerate(different)}
    return Batch(_sent(numbers, device), _sent([places[name] for name in names], device))


def gates(logits: Tensor, *, noise: Tensor | None = None, rounded: bool = False) -> Tensor:
    """Returns each skill's gate in [0, 1].

    Args:
        logits: Any shape.
        noise: Of a relaxed Bernoulli sample at temperature 1: logistic, of the same shape.
        rounded: Whether the gate is 0 or 1, with the gradient of the gate that was rounded; of a split's, the last
            dimension, the largest is always 1.
    """
    soft = torch.sigmoid(logits if noise is None else logits + noise)
    if not rounded:
        return soft
    hard = (soft >= 0.5) | (soft == soft.amax(-1, keepdim=True))
    return soft + (hard.to(soft) - soft).detach()


def mixing_weights(gates_USK: Tensor) -> Tensor:
    """Returns the gates over their sum in each split."""
    return gates_USK / (gates_USK.sum(-1, keepdim=True) + _LEAST)


def _sent(numbers: list[int], device: torch.device) -> Tensor:
    held = torch.tensor(numbers)
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held.to(device)
