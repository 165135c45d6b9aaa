"""Which part of a tensor that FSDP2 has taken apart this process has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["first_row", "in_shards", "is_sharded", "own_rows", "own_share", "put_whole", "take_apart", "whole"]


def is_sharded(model: nn.Module) -> bool:
    """Returns whether FSDP2 has taken any part of a model apart."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def take_apart(model: nn.Module) -> None:
    """Has FSDP2 let go of what it keeps gathered: what is written into shards is then what the next pass sees."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Otherwise the outermost one keeps what it gathered for as long as its forward pass runs.
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


@contextlib.contextmanager
def in_shards(model: nn.Module) -> Iterator[None]:
    """Within it a model that runs, if FSDP2 has taken it apart, is in shards, which may be written."""
    take_apart(model)
    yield
    if isinstance(model, FSDPModule):
        model.unshard()  # its own forward pass has begun already; other modules gather when theirs does


def own_rows(tensor: Tensor) -> range:
    """Returns which rows of a tensor this process has: all, or its shard along the first dimension."""
    if not isinstance(tensor, DTensor):
        return range(tensor.shape[0])
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return range(offset[0], offset[0] + shape[0])


def first_row(tensor: Tensor) -> int:
    """Returns where what this process has begins along the first dimension; 0 of a tensor that is whole."""
    return own_rows(tensor).start if isinstance(tensor, DTensor) else 0


def own_share(tensor: Tensor) -> Tensor:
    """Returns the rows that this process has, as a plain tensor that shares their memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Returns the tensor in one piece, detached; every process has to call it."""
    tensor = tensor.detach()
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


@torch.no_grad()
def put_whole(tensor: Tensor, value: Tensor) -> None:
    """Copies a value in one piece into a tensor; of a sharded one each process writes its own rows."""
    rows = own_rows(tensor) if tensor.ndim else range(1)
    own_share(tensor).copy_(value[rows.start : rows.stop] if tensor.ndim else value)
