"""This process among those of a run: which batches are its own, and where all wait for each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

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
        """Waits until all processes are here, as long as that takes."""
        if self.count == 1:
            return
        store = _store()
        arrived = store.add("arrived", 1)
        everyone = f"all of turn {(arrived - 1) // self.count}"  # nobody is a turn ahead of another
        if arrived % self.count == 0:
            store.set(everyone, "")
        store.wait([everyone], timedelta(days=7))


@cache
def _store() -> Store:
    """Returns a place where the processes leave each other notes.

    Not a process group: training makes the first one. A second in the same store may read the addresses of the first,
    where nobody listens any more.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://"))
    return PrefixStore("finetune/selection", store)
