"""An optimizer's state in one piece, as one process has it, where FSDP2 has taken its parameters apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

__all__ = ["shard_state", "whole_state"]


def whole_state(optimizer: Optimizer) -> dict[str, Any]:
    """Returns ``optimizer.state_dict()`` with every shard gathered onto the CPU; every process has to call it."""
    state: dict[str, Any] = optimizer.state_dict()
    gathered = {number: {key: _whole(value) for key, value in own.items()} for number, own in state["state"].items()}
    return {**state, "state": gathered}


@torch.no_grad()
def shard_state(optimizer: Optimizer) -> None:
    """Keeps of a state in one piece, as :meth:`Optimizer.load_state_dict` took it, what this process has."""
    for parameter, own in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for key, value in own.items():
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
                own[key] = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.cpu() if isinstance(value, Tensor) else value
