"""What the scripts share that :mod:`support.processes` runs: in one process, or in several over gloo."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from support.tiny import token_batch

__all__ = ["distributed", "own_rows", "rank", "save_results", "shard", "whole_parameters"]

distributed = "RANK" in os.environ
if distributed:
    dist.init_process_group("gloo")
rank = dist.get_rank() if distributed else 0


def own_rows(step: int) -> Tensor:
    """Returns this process's rows of a batch of four, int64 (B, 10)."""
    rows = token_batch(4, 10, seed=step)
    return rows[2 * rank : 2 * rank + 2] if distributed else rows


def shard(model: Any, blocks: Any, **options: Any) -> None:
    """Has FSDP2 take a model apart, block by block, where there are several processes."""
    if distributed:
        for block in blocks:
            fully_shard(block)
        fully_shard(model, **options)


def whole_parameters(model: Any, *, without: str = "") -> dict[str, Tensor]:
    """Returns copies of the parameters, gathered, but for the one named ``without``."""
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in model.named_parameters()
        if name != without
    }


def save_results(results: Any) -> None:
    """Writes them where the script was told, once, and ends the script.

    Without the interpreter's own end: a thread of gloo that still holds a tensor then would abort the process, and
    what DDP and FSDP2 hold keeps the group from being destroyed before (PyTorch #179291).
    """
    if rank == 0:
        torch.save(results, sys.argv[1])
    if distributed:
        dist.barrier()
        sys.stderr.flush()
        os._exit(0)
