"""Every process has the whole model; what trains may change from step to step."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.tensor import DTensor

from finetune.engines.engine import Engine
from finetune.engines.reducer import GradientReducer
from finetune.methods.primitives.process_group import require_same_over_processes

if TYPE_CHECKING:
    from torch import nn

    from finetune.methods import Method

__all__ = ["Replicated"]


class Replicated(Engine):
    """Averages the gradients of what trains now, where ``DistributedDataParallel`` would expect always the same."""

    owns_model: ClassVar[bool] = True

    def describe(self) -> str:
        """Returns how the model is shared, in a line."""
        return f"ddp: {self.processes} processes, each with the whole model; gradients of what trains now are averaged"

    def prepare(self, model: nn.Module, method: Method, device: torch.device) -> None:
        """Moves the model to the device."""
        model.to(device)
        self._model, self._method = model, method
        self.reducer = GradientReducer(self._replicated)

    def begin(self) -> None:
        """Checks that every process begins with the same values of what trains.

        Raises:
            TrainingError: They have chosen or drawn differently.
        """
        digest = hashlib.sha256()
        for name, parameter in self._method.trained_parameters().items():
            digest.update(f"{name} {tuple(parameter.shape)} ".encode())
            if not isinstance(parameter, DTensor):
                digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        require_same_over_processes(digest.digest(), "the parameters that train", next(self._model.parameters()).device)

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Averages the gradients after the last one before a step."""
        if last:
            self.reducer.begin()
        yield
        if last:
            self.reducer.finish()

    def _replicated(self) -> Iterable[nn.Parameter]:
        alone = self._method.averages()
        named: Any = self._method.trained_parameters().items()
        return [p for name, p in named if not isinstance(p, DTensor) and name not in alone]
