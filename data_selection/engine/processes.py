"""This process among those of a run: which batches are its own, and where all wait for each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Processes"]

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The processes that share the work.

    Attributes:
        rank: The number of this one.
        count: How many there are.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def of_environment(cls) -> Processes:
        """Returns this process as ``torchrun`` describes it in its environment."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    def share(self, items: Sequence[T]) -> list[T]:
        """Returns the items of this process: every ``count``-th, so that all get long and short ones."""
        return list(items[self.rank :: self.count])

    def wait(self) -> None:
        """Waits until all processes are here."""
        if self.count == 1:
            return
        from datetime import timedelta

        import torch.distributed as dist

        if not dist.is_initialized():
            # No tensor is exchanged; a rank may wait as long as another has work.
            dist.init_process_group("gloo", timeout=timedelta(days=7))
        dist.barrier()

    def leave(self) -> None:
        """Ends the talk among processes, once all are here, so that whoever comes next begins its own."""
        self.wait()
        if self.count > 1:
            import torch.distributed as dist

            dist.destroy_process_group()
