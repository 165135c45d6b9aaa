"""Adam's bias correction by the age of each entry instead of the age of the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

__all__ = ["EntryAge"]


class EntryAge:
    """Redoes the step of an Adam optimizer for entries that began to train later than the run.

    Adam divides its moments by ``1 - beta^t``; for an entry whose moments began at zero ``a`` steps ago the right power
    is ``a``: its first update is the learning rate, whenever it comes. The moments are the optimizer's own, so what it
    saves and resumes stays as it is. Optimizers without Adam's moments have nothing to correct.

    Args:
        values: The parameter, one entry per element (B,).
    """

    def __init__(self, values: nn.Parameter) -> None:
        self._values = values
        self._before: Tensor | None = None

    def remember(self, optimizer: Optimizer) -> None:
        """Keeps what the step starts from."""
        self._before = None if self._values.grad is None else self._values.detach().clone()

    @torch.no_grad()
    def correct(self, optimizer: Optimizer, age: Tensor) -> None:
        """Replaces the values by what the step gives with the bias corrections of ``age``.

        Args:
            optimizer: What has just stepped.
            age: Steps in which each entry has had a gradient, this one included, int64 (B,).
        """
        state: dict[str, Any] = optimizer.state.get(self._values, {})
        if self._before is None or "exp_avg" not in state or "exp_avg_sq" not in state:
            return
        group = next(g for g in optimizer.param_groups if any(p is self._values for p in g["params"]))
        steps = torch.as_tensor(state["step"], device=age.device)
        # An optimizer that was made anew has moments of its own age only.
        age = torch.minimum(age, steps.to(age.dtype)).clamp(min=1).double()
        beta1, beta2 = (float(beta) for beta in group["betas"])
        first = state["exp_avg"] / (1 - beta1**age).float()
        second = state.get("max_exp_avg_sq", state["exp_avg_sq"]) / (1 - beta2**age).float()
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))
        start = self._before * (1 - group["lr"] * group["weight_decay"]) if decoupled else self._before
        self._values.copy_(start - group["lr"] * first / (second.sqrt() + group["eps"]))
        self._before = None
