"""What has to be the same on every process that trains the model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from finetune.core.errors import TrainingError

__all__ = [
    "PROPOSALS_PER_ENTRY",
    "gather_over_processes",
    "mean_over_processes",
    "process_rank",
    "processes",
    "require_same_over_processes",
    "union_over_processes",
]

PROPOSALS_PER_ENTRY = 5
"""How many candidates are proposed per entry that will be chosen, where not all gradients are there at once."""


def processes() -> int:
    """Returns how many processes train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_rank() -> int:
    """Returns the number of this process among those that train together; 0 speaks for all."""
    return dist.get_rank() if processes() > 1 else 0


def mean_over_processes(tensor: Tensor) -> Tensor:
    """Returns the mean of ``tensor`` over the processes, leaving it as it is."""
    if processes() == 1:
        return tensor
    mean: Tensor = tensor.clone()
    dist.all_reduce(mean)
    mean.div_(processes())
    return mean


def gather_over_processes(tensor: Tensor) -> Tensor:
    """Returns the tensors of all processes, of the same shape everywhere, stacked by rank."""
    if processes() == 1:
        return tensor.unsqueeze(0)
    every = [torch.empty_like(tensor) for _ in range(processes())]
    dist.all_gather(every, tensor)
    return torch.stack(every)


def union_over_processes(index: Tensor) -> Tensor:
    """Returns the distinct positions, ascending, that any process has in ``index``; all have equally many."""
    if processes() == 1:
        return index
    union: Tensor = torch.unique(gather_over_processes(index))
    return union


def require_same_over_processes(digest: bytes, what: str, device: torch.device) -> None:
    """Checks that every process has the same digest of ``what``; all of them have to call it.

    Raises:
        TrainingError: They have not.
    """
    if processes() == 1:
        return
    every = gather_over_processes(torch.tensor(list(digest), dtype=torch.uint8, device=device))
    others = [rank for rank, other in enumerate(every) if not torch.equal(other, every[0])]
    if others:
        raise TrainingError(
            f"the processes have drifted apart: {what} are not the same everywhere",
            got=f"process {', '.join(map(str, others))} differs from process 0",
            fix="wrap the model in DistributedDataParallel before its first training forward pass, with "
            "find_unused_parameters=True",
        )
