"""Plans of shared pools: counts, disjointness, balance, and the published worked examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.methods.primitives.shard_plans import ShardPlan, cyclic_plan, dead_shards, sampled_plan, shared_plan


def mos(**changes: Any) -> ShardPlan:
    given = {"layers": 32, "rank": 16, "budget": 8, "private": 1, "shards": 4, "dealing": "balanced", "seed": 0}
    return sampled_plan(**{**given, "stream": "q.A", **changes})


@pytest.mark.parametrize("dealing", ["random", "balanced"])
@pytest.mark.parametrize(
    ("rank", "budget", "private", "shards"), [(16, 8, 1, 4), (4, 2, 1, 2), (8, 8, 8, 2), (6, 2, 0, 1)]
)
def test_no_layer_uses_a_shard_twice_and_private_ones_are_its_own(
    dealing: str, rank: int, budget: int, private: int, shards: int
) -> None:
    plan = mos(rank=rank, budget=budget, private=private, shards=shards, dealing=dealing)
    assert plan.rows == 32 * budget * shards
    assert plan.index.shape == (32, rank, shards)
    assert plan.index.dtype == torch.int32
    flat = plan.index.flatten(1)
    assert all(row.unique().numel() == row.numel() for row in flat)
    public = 32 * (budget - private) * shards
    assert (flat[:, : (rank - private) * shards] < public).all()
    own = flat[:, (rank - private) * shards :]
    assert torch.equal(own.flatten(), torch.arange(public, plan.rows, dtype=torch.int32))


def test_balanced_plans_use_every_shard_and_random_ones_leave_the_expected_share_out() -> None:
    for rank, budget in ((16, 8), (4, 2)):
        plan = mos(rank=rank, budget=budget)
        uses = plan.index[:, : rank - 1].flatten().bincount(minlength=32 * (budget - 1) * 4)
        assert uses.max() - uses.min() <= 1
        assert dead_shards(plan) == 0
    # (1 - (r - p) / ((e - p) L))^L of the public shards: 11.3 %
    public = 32 * 7 * 4
    shares = [dead_shards(mos(dealing="random", seed=seed)) / public for seed in range(8)]
    assert sum(shares) / 8 == pytest.approx((1 - 15 / (7 * 32)) ** 32, abs=0.01)


def test_seeds_and_streams_tell_plans_apart() -> None:
    assert torch.equal(mos().index, mos().index)
    assert not torch.equal(mos().index, mos(seed=1).index)
    assert not torch.equal(mos().index, mos(stream="q.B").index)
    torch.manual_seed(5)  # nothing of the global state
    assert torch.equal(mos().index, mos(seed=0).index)


def test_pure_sharing_and_the_choice_of_a_subset() -> None:
    pure = shared_plan(3, 6, rows=6)
    assert pure.index.tolist() == [[[row] for row in range(6)]] * 3
    subset = shared_plan(3, 4, rows=6, seed=1, stream="q")
    assert subset.index.shape == (3, 4, 1)
    assert all(row.unique().numel() == 4 for row in subset.index.flatten(1))
    assert not torch.equal(subset.index[0], subset.index[1])


def test_prolora_rotates_as_in_the_published_code() -> None:
    plan = cyclic_plan(2, 3, unshared=0, shards=2)
    assert plan.index[0].tolist() == [[0, 1], [1, 2], [2, 0]]
    assert plan.index[1].tolist() == [[3, 4], [4, 5], [5, 3]]
    assert plan.rows == 6
    plan = cyclic_plan(1, 4, unshared=1, shards=2)
    # (r - u) shared shards and u vectors of two shards of their own
    assert plan.rows == 5
    assert plan.index[0].tolist() == [[0, 1], [1, 2], [2, 0], [3, 4]]
    # Eight shards in two slots: half a turn, not one place.
    assert cyclic_plan(1, 8, unshared=0, shards=2).index[0].tolist()[:2] == [[0, 4], [1, 5]]
    whole = cyclic_plan(1, 2, unshared=2, shards=3)
    assert whole.index[0].tolist() == [[0, 1, 2], [3, 4, 5]]
