"""Gathers frozen weights as int8: a quarter of the bytes of float32, about half of those of bfloat16."""

# Legend: N numbers of this process's part of a block, S processes, G numbers that share a scale

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

__all__ = ["Int8AllGather", "gather_int8"]

_GROUP = 64
"""Numbers that share a scale, the largest magnitude among them over 127."""


class Int8AllGather:
    """What FSDP2 calls in place of its all-gather, for a group of parameters that never change.

    The part of this process is quantised once, and kept so beside the exact one, which saving and summaries read.
    Every process computes with the same rounded weights, its own part included.

    Attributes:
        bytes: Bytes that this process has handed in so far.
    """

    def __init__(self) -> None:
        self._own: tuple[Tensor, Tensor] | None = None
        self.bytes = 0

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the buffer that FSDP2 gathers into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fills ``output_tensor`` (S x N) with what the processes hand in as ``input_tensor`` (N), rounded.

        On the current stream, which is that of FSDP2's gathers: nothing is left to wait for.
        """
        if self._own is None:
            # FSDP2 hands in a view of the output, and pads; copies are made before anything is written.
            self._own = _quantise(input_tensor)
        values, scales = self._own
        parts = dist.get_world_size(group)
        all_values = values.new_empty(parts * values.numel())
        all_scales = scales.new_empty(parts * scales.numel())
        dist.all_gather_single(all_values, values.view(-1), group=group)
        dist.all_gather_single(all_scales, scales, group=group)
        self.bytes += values.numel() + scales.numel() * scales.element_size()
        whole = all_values.view(parts, -1, _GROUP) * all_scales.view(parts, -1, 1).float()
        output_tensor.view(parts, -1).copy_(whole.view(parts, -1)[:, : input_tensor.numel()])


def _quantise(part_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 values (N padded to a multiple of G / G, G) and the float32 scale of each group."""
    groups = F.pad(part_N.float(), (0, -part_N.numel() % _GROUP)).view(-1, _GROUP)
    scales = groups.abs().amax(1).div_(127).clamp_min(torch.finfo(torch.float32).tiny)
    return (groups / scales.unsqueeze(1)).round_().to(torch.int8), scales


def gather_int8(module: FSDPModule) -> Int8AllGather:
    """Has the parameters of one FSDP2 group, all of them frozen, gathered as int8; returns what gathers."""
    gather = Int8AllGather()
    module.set_custom_all_gather(cast(Any, gather))
    return gather
