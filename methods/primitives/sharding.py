"""Which part of a tensor that FSDP2 has taken apart this process has."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["own_rows", "own_share", "put_whole", "whole"]


def own_rows(tensor: Tensor) -> range:
    """Returns which rows of a tensor this process has: all, or its shard along the first dimension."""
    if not isinstance(tensor, DTensor):
        return range(tensor.shape[0])
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return range(offset[0], offset[0] + shape[0])


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
