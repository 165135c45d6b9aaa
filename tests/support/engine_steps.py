"""A method under an engine, in a script of one process or of two: the same rows, the same steps, the same result."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from finetune.config.schema import EngineSection
from finetune.engines.choose import choose_engine
from support.conformance_cases import base_model, make
from support.distributed import distributed, rank
from support.tiny import token_batch

__all__ = ["EngineSteps"]

PROCESSES = 2 if distributed else 1
ROWS, MICRO = 8, 2
"""Rows of a global batch, and of one forward pass."""


@dataclass
class EngineSteps:
    """Trains a conformance case: as one process, or as several under an engine.

    Args:
        name: Of the case.
        strategy: Of the engine, where there are several processes.
        section: Of a recipe.
        max_norm: Norm that gradients are clipped to; 0: they are not.
    """

    name: str
    strategy: str
    section: EngineSection = field(default_factory=EngineSection)
    max_norm: float = 0.0

    def __post_init__(self) -> None:
        base = base_model(self.name) if self.name == "bitfit" else base_model(self.name, layers=4)
        self.method = make(self.name)
        torch.manual_seed(3)
        ids = token_batch(4, 16)
        model = self.method.attach(base, calibration=[{"input_ids": ids, "labels": ids}])
        self.method.bind(total_steps=6)
        strategy = self.strategy if distributed else "single"
        self.engine = choose_engine(strategy, self.section, PROCESSES, self.method)
        self.engine.prepare(model, self.method, torch.device("cpu"))
        self.model: nn.Module = model.train()
        if distributed and not self.engine.owns_model:
            self.model = DistributedDataParallel(model)
        # Adam's first step of a gradient near zero is a matter of rounding, unless eps is above it.
        parameters = self.method.trained_parameters().values()
        adamw = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1)
        self.optimizer = self.engine.take(adamw, max_norm=self.max_norm)
        self.engine.begin()
        self.norms: list[float] = []

    def train(self, numbers: Iterable[int], seed: int) -> dict[str, Tensor]:
        """Takes one step per number, which is the seed of its batch, and returns a copy of what was learned."""
        torch.manual_seed(seed)
        for number in numbers:
            self._step(token_batch(ROWS, 10, seed=number))
        with self.engine.whole():
            return {key: tensor.clone() for key, tensor in self.method.state_dict().items()}

    def optimizer_state(self) -> dict[str, Any]:
        """Returns a copy of the optimizer's state in one piece: parameter's number -> key -> value."""
        state: dict[str, Any] = copy.deepcopy(self.engine.optimizer_state(self.optimizer)["state"])
        return state

    def _step(self, batch: Tensor) -> None:
        accumulation = ROWS // MICRO // PROCESSES
        task: dict[str, Any] = {"tasks": ["one"] * MICRO} if self.method.routes else {}
        for part in range(accumulation):
            start = MICRO * (part * PROCESSES + rank)
            rows = batch[start : start + MICRO]
            last = part == accumulation - 1
            GradientState()._set_sync_gradients(last)  # as every trainer says it
            with self.engine.micro_batch(last=last):
                output = self.engine.network(self.model)(input_ids=rows, labels=rows, **task)
                (output.loss / accumulation).backward()
        self.norms.append(self._clip())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _clip(self) -> float:
        norm = self.engine.grad_norm()
        if norm is None and self.max_norm:
            norm = float(nn.utils.clip_grad_norm_(self.method.trained_parameters().values(), self.max_norm))
        return norm or 0.0
