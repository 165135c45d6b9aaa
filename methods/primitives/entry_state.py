"""The state of a pool of entries as named tensors, and back, strictly."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from finetune.core.errors import CheckpointError
from finetune.core.learned_state import BASE, INDEX, TRAINING, VALUE, learned_names, narrowest_exact
from finetune.methods.primitives.entry_gradient import BACKENDS
from finetune.methods.primitives.entry_pool import EntryPool

__all__ = ["load_pool_state", "pool_state"]

_VALUES, _SLOTS, _BACKENDS = f"{TRAINING}values", f"{TRAINING}slots", f"{TRAINING}backends"


def pool_state(pool: EntryPool) -> dict[str, Tensor]:
    """Returns ``NAME.{index, value, base}`` of tensors with chosen entries, and what resuming needs besides."""
    state: dict[str, Tensor] = {}
    slots = []
    for name, entries in pool.tensors.items():
        if entries.index.numel():
            state[f"{name}{INDEX}"] = entries.index
            state[f"{name}{VALUE}"] = pool.absolute(entries)
            state[f"{name}{BASE}"] = narrowest_exact(entries.base)
            slots.append(entries.slot)
    if slots:
        state[_SLOTS] = torch.cat(slots)
    if pool.to_base:
        # The sum with the base is rounded: training goes on from the change itself.
        state[_VALUES] = pool.values.detach()
    backends = [list(BACKENDS).index(entries.backend) for entries in pool.tensors.values()]
    return {**state, _BACKENDS: torch.tensor(backends, dtype=torch.uint8)}


@torch.no_grad()
def load_pool_state(pool: EntryPool, state: Mapping[str, Tensor], *, over_adapter: bool = False) -> None:
    """Chooses and sets what ``state`` says.

    Args:
        pool: The pool, whatever it has chosen.
        state: As :func:`pool_state` returns it.
        over_adapter: Whether the entries are those of an adapter whose trained weights have been loaded: what they were
            at first only ``state`` knows then.

    Raises:
        CheckpointError: A tensor is missing, does not fit, or belongs to another base. Nothing is changed then.
    """
    _check_names(pool, state)
    if not over_adapter:
        for name in learned_names(state):
            _check_base(pool, name, state)
        pool.restore_base()
    start = 0
    for name, entries in pool.tensors.items():
        index = state.get(f"{name}{INDEX}", torch.empty(0, dtype=torch.int64)).to(entries.weight.device)
        stop = start + index.numel()
        slot = state[_SLOTS][start:stop].to(index) if index.numel() else index
        base = state[f"{name}{BASE}"].to(entries.weight) if index.numel() else entries.flat[:0]
        entries.set(index, slot, base)
        if index.numel() and not pool.to_base:
            pool.values[slot] = state[f"{name}{VALUE}"].to(pool.values)
        start = stop
    if pool.to_base:
        pool.values.copy_(state[_VALUES])
    for entries, backend in zip(pool.tensors.values(), state[_BACKENDS].tolist(), strict=True):
        entries.backend = list(BACKENDS)[backend]
    pool.write()


def _check_names(pool: EntryPool, state: Mapping[str, Tensor]) -> None:
    names = learned_names(state)
    wanted = {f"{name}{part}" for name in names for part in (INDEX, VALUE, BASE)} | {_BACKENDS}
    wanted |= ({_SLOTS} if names else set()) | ({_VALUES} if pool.to_base else set())
    missing = sorted(wanted - state.keys())
    unknown = sorted(set(names) - pool.tensors.keys())
    if missing or unknown:
        raise CheckpointError(
            "the learned state does not fit what the method trains",
            where=", ".join([*missing, *unknown][:4]),
            got=f"{len(missing)} tensors missing, {len(unknown)} of other parameters",
            fix="attach with the config and base that the state was trained with",
        )
    total = sum(state[f"{name}{INDEX}"].numel() for name in names)
    if total > pool.values.numel():
        raise CheckpointError(
            "the learned state has more entries than the budget",
            got=f"{total:,}",
            want=f"at most {pool.values.numel():,}",
        )


def _check_base(pool: EntryPool, name: str, state: Mapping[str, Tensor]) -> None:
    """Checks the weight against the stored base values, or the trained ones where a stock trainer loaded those."""
    entries = pool.tensors[name]
    plain = entries.flat.index_put((entries.index,), entries.base) if entries.index.numel() else entries.flat
    index, value, base = (state[f"{name}{part}"].to(plain.device) for part in (INDEX, VALUE, BASE))
    fits = index.shape == value.shape == base.shape and bool((index >= 0).all() and (index < plain.numel()).all())
    if fits:
        here = plain.index_select(0, index)
        fits = bool(((here == base.to(here)) | (here == value.to(here))).all())
    if not fits:
        raise CheckpointError(
            "the learned state belongs to another base model", where=name, fix="load the base it was trained on"
        )
