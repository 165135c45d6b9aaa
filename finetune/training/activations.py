"""Runs whose activations wait elsewhere for the backward pass: what that cannot be combined with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from finetune.core.errors import CapabilityError
from finetune.offload.activations import OffloadedActivations

if TYPE_CHECKING:
    import torch
    from torch import nn

    from finetune.config.schema import OffloadSection
    from finetune.engines.engine import Engine

__all__ = ["activation_lines", "away_lines", "check_activations", "offload_activations"]

_KEY = "engine.offload.activations"


def check_activations(section: OffloadSection, engine: Engine, device: torch.device) -> None:
    """Refuses what would help nobody, before anything is loaded.

    Raises:
        CapabilityError: Activations would wait where they are, or by way of the CPU's memory; or weights are sharded.
    """
    place = section.activations
    if place == "none":
        return
    if engine.together:
        raise CapabilityError(
            f"with {engine.name} gathered weights and activations cannot be told apart",
            where=_KEY,
            got=f"{place}, engine {engine.name}",
            fix="train.activation_checkpointing: true",
        )
    right = "disk" if device.type == "cpu" else "cpu"
    if place != right:
        reason = "are there already" if right == "disk" else "would go there by way of the CPU's memory"
        raise CapabilityError(
            f"activations of a model on {device.type} {reason}", where=_KEY, got=place, fix=f"{_KEY}: {right}"
        )


def offload_activations(section: OffloadSection, model: nn.Module, run: Path) -> OffloadedActivations | None:
    """Returns what puts the activations of a run away, or None where they stay."""
    return None if section.activations == "none" else OffloadedActivations(model, section.activations, run)


def activation_lines(section: OffloadSection) -> list[tuple[str, str]]:
    """Returns what the plan says of it: a label and a text, or nothing."""
    place = {"none": "", "cpu": "the CPU's memory", "disk": "a file"}[section.activations]
    return [("offload", f"activations wait in {place} for the backward pass")] if place else []


def away_lines(size: int | None) -> list[tuple[str, str]]:
    """Returns what the end of a run says of so many bytes that were put away."""
    return [("offload", f"{size / 1e9:.1f} GB of activations put away and fetched")] if size else []
