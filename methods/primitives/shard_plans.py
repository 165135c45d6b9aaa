"""Which rows of a shared pool make up the factors of each layer's update (MoS, arXiv 2410.00938; PRoLoRA, 2402.16902).

A factor of rank r over n features is r vectors of n numbers; each is cut into l shards of n / l numbers, and a shard is
a row of a pool that several layers share. A plan says which row fills which slot.
"""

# Legend: L layers that share a pool, R rank, S shards per vector

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["ShardPlan", "cyclic_plan", "dead_shards", "sampled_plan", "shared_plan"]

Dealing = Literal["balanced", "random"]


@dataclass(frozen=True)
class ShardPlan:
    """The rows of one pool that the layers of a group use.

    Attributes:
        rows: Rows of the pool.
        index: Row of each slot, int32 (L, R, S).
    """

    rows: int
    index: Tensor

    @property
    def shards(self) -> int:
        """Shards per vector."""
        return self.index.shape[2]


def sampled_plan(
    layers: int, rank: int, *, budget: int, private: int, shards: int, dealing: Dealing, seed: int, stream: str
) -> ShardPlan:
    """Returns MoS's plan: each layer takes shards of the public ones without repetition, and its own private vectors.

    The pool has ``layers * budget * shards`` rows, public ones first. The last ``private`` vectors of a layer are its
    own, in order, so that those of both factors belong together.

    Args:
        layers: L.
        rank: R, at least ``budget``.
        budget: Rank of the plain LoRA with as many parameters.
        private: Vectors of each layer that no other uses.
        shards: S.
        dealing: ``random`` draws each layer's shards anew, so that no layer uses some; with ``balanced`` the numbers of
            layers that use a public shard differ by one at most.
        seed: Of the draws.
        stream: Told apart from other draws of the same seed by it.
    """
    public_vectors, vectors = (budget - private) * layers, rank - private
    public, wanted = public_vectors * shards, vectors * shards
    generator = torch.Generator().manual_seed(_seed(seed, stream))
    uses = torch.zeros(public)
    index = torch.empty(layers, rank * shards, dtype=torch.int32)
    own = torch.arange(private * shards, dtype=torch.int32)
    for layer in range(layers):
        drawn = torch.rand(public, generator=generator)
        # Those that fewer layers use come first, equal ones by chance.
        hand = (drawn if dealing == "random" else uses + drawn).argsort()[:wanted]
        uses[hand] += 1
        index[layer, :wanted] = hand[torch.randperm(wanted, generator=generator)]
        index[layer, wanted:] = public + layer * own.numel() + own
    return ShardPlan(layers * budget * shards, index.view(layers, rank, shards))


def shared_plan(layers: int, rank: int, *, rows: int, seed: int | None = None, stream: str = "") -> ShardPlan:
    """Returns a plan of whole vectors: all layers use the first ``rank`` rows, or with a seed each a random choice."""
    if seed is None:
        choice = torch.arange(rank).expand(layers, rank)
    else:
        generator = torch.Generator().manual_seed(_seed(seed, stream))
        choice = torch.stack([torch.randperm(rows, generator=generator)[:rank] for _ in range(layers)])
    return ShardPlan(rows, choice.to(torch.int32).unsqueeze(-1).contiguous())


def cyclic_plan(layers: int, rank: int, *, unshared: int, shards: int) -> ShardPlan:
    """Returns PRoLoRA's plan: no layer shares with another; a vector repeats one shard, rotated from slot to slot.

    Of the ``rank`` vectors of a layer the last ``unshared`` have shards of their own.

    Args:
        layers: L.
        rank: R.
        unshared: Vectors that repeat nothing.
        shards: S.
    """
    shared = rank - unshared
    shift = max(shared // shards, 1)
    slots = torch.arange(shards)
    repeated = (torch.arange(shared)[:, None] + slots * shift) % max(shared, 1)
    own = shared + torch.arange(unshared * shards).view(unshared, shards)
    rows = shared + unshared * shards
    index = torch.cat([repeated, own]) + rows * torch.arange(layers)[:, None, None]
    return ShardPlan(layers * rows, index.to(torch.int32))


def dead_shards(plan: ShardPlan) -> int:
    """Returns how many rows of the pool no layer uses: they are stored and never trained."""
    return plan.rows - int((plan.index.flatten().bincount() > 0).sum())


def _seed(seed: int, stream: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {stream}".encode()).digest()[:7], "little")
