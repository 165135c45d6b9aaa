"""The order of examples: a permutation, the same for the same seed and epoch, with little padding."""

from __future__ import annotations

import random

from finetune.training.sampler import EpochSampler


def sampler(count: int = 1003, *, group: bool = True, seed: int = 1) -> EpochSampler:
    lengths = [random.Random(i).randint(5, 500) for i in range(count)]
    return EpochSampler(lengths, batch_size=8, seed=seed, group_by_length=group)


def test_every_epoch_is_another_permutation_given_by_seed_and_epoch() -> None:
    for group in (True, False):
        orders = [sampler(group=group).order(epoch) for epoch in (0, 1, 0)]
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(1003))
        assert orders[0] == orders[2] != orders[1]
        assert orders[0] != sampler(group=group, seed=2).order(0)


def test_grouping_takes_most_of_the_padding_away_and_stays_random() -> None:
    grouped, plain = sampler(group=True), sampler(group=False)

    def padding(source: EpochSampler) -> float:
        lengths, order = source._lengths.tolist(), source.order(0)
        batches = [[lengths[row] for row in order[i : i + 8]] for i in range(0, len(order), 8)]
        return sum(max(batch) * len(batch) for batch in batches) / sum(lengths) - 1

    assert padding(plain) > 0.5
    assert padding(grouped) < 0.1
    means = [sum(grouped._lengths[grouped.order(0)[i : i + 8]].tolist()) for i in range(0, 960, 8)]
    assert means != sorted(means)
    assert means != sorted(means, reverse=True)


def test_tokens_and_rows_of_a_step_follow_the_order() -> None:
    source = sampler(20)
    lengths, first, second = source._lengths, source.order(0), source.order(1)
    assert source.tokens(2, rows_per_step=8, steps_per_epoch=3) == int(lengths[first[:16]].sum())
    assert source.tokens(4, rows_per_step=8, steps_per_epoch=3) == int(lengths.sum() + lengths[second[:8]].sum())
    assert source.rows(3, rows_per_step=8, steps_per_epoch=3) == second[:8]


def test_processes_that_share_rows_get_every_batch_in_turn() -> None:
    lengths = [5] * 21
    plain = EpochSampler(lengths, batch_size=8, seed=1, group_by_length=False)
    twice = EpochSampler(lengths, batch_size=8, seed=1, group_by_length=False, same_rows=2, micro_batch=4)
    order = plain.order(0)
    batches = [list(twice)[start : start + 4] for start in range(0, len(twice), 4)]
    assert batches[::2] == batches[1::2]
    assert [row for batch in batches[::2] for row in batch] == order + order[:3]
    few = EpochSampler([5, 5], batch_size=8, seed=1, group_by_length=False, same_rows=3, micro_batch=8)
    assert len(list(few)) == len(few) == 24
