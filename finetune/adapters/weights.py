"""Puts a learned state on a model and takes it off again, bit for bit."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from finetune.adapters.learned import read_learned
from finetune.core.errors import CheckpointError

__all__ = ["apply", "switch", "unapply"]


def apply(model: nn.Module, folder: str | Path) -> nn.Module:
    """Writes what was learned into the weights of its base, in place, rounded once; returns ``model``.

    Args:
        model: The base that the state was trained on, in any dtype.
        folder: A learned state with base values.

    Raises:
        CapabilityError: The state has no base values.
        CheckpointError: The model is another one, or the state is damaged; nothing was changed.
    """
    learned = read_learned(folder)
    for name, weight in learned.require(model, tuned=False).items():
        learned.tensors[name].write(weight, learned.tensors[name].value)
    return model


def unapply(model: nn.Module, folder: str | Path) -> nn.Module:
    """Gives the weights that :func:`apply` changed their base values back, bit for bit; returns ``model``.

    Args:
        model: A model that holds what was learned.
        folder: The learned state.

    Raises:
        CapabilityError: The state has no base values.
        CheckpointError: The model does not hold it, or the state is damaged; nothing was changed.
    """
    learned = read_learned(folder)
    for name, weight in learned.require(model, tuned=True).items():
        learned.tensors[name].write(weight, learned.tensors[name].base)
    return model


def switch(model: nn.Module, old: str | Path, new: str | Path) -> nn.Module:
    """Takes ``old`` off and puts ``new`` on, touching only what either learned; returns ``model``.

    Args:
        model: A model that holds ``old``.
        old: The learned state that is on it.
        new: A learned state of the same base.

    Raises:
        CapabilityError: A state has no base values.
        CheckpointError: A state does not fit; the model is as it was.
    """
    read_learned(new)
    unapply(model, old)
    try:
        return apply(model, new)
    except CheckpointError:
        apply(model, old)
        raise
