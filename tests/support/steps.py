"""Training steps in a plain loop: what a method has to do no more than survive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from support.tiny import token_batch

__all__ = ["adamw", "take_steps"]


def adamw(method: Any, **options: Any) -> torch.optim.AdamW:
    """Returns AdamW over what the attached method trains; learning rate 1e-2, no weight decay."""
    return torch.optim.AdamW(method.trained_parameters().values(), **{"lr": 1e-2, "weight_decay": 0.0, **options})


def take_steps(model: Any, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Takes one optimizer step per number: the number is the seed of its batch of two rows."""
    for step in steps:
        ids = token_batch(2, 9, seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
