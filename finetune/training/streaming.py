"""Runs whose frozen weights stay on disk: what they cannot be combined with, and what they save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from finetune.core.errors import CapabilityError
from finetune.offload.blocks import find_blocks
from finetune.offload.streamer import Traffic

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments

    from finetune.methods import Method
    from finetune.training.plan import Plan

__all__ = ["STREAMED", "check_streamed", "elsewhere_bytes", "recomputes", "streaming_lines", "traffic_lines"]

STREAMED = ("disk", "mmap")
"""Values of ``engine.offload.weights`` with which blocks are streamed."""
_KEY = "engine.offload.weights"


def check_streamed(method: Method, arguments: TrainingArguments, device: torch.device) -> None:
    """Refuses what would write to weights that are only read, before anything is loaded.

    Raises:
        CapabilityError: The method changes the base's own weights, several processes run, or an accelerator computes.
    """
    if method.writes_base:
        raise CapabilityError(
            f"{method.name} changes the base's weights, and those that are streamed are only read",
            where=_KEY,
            want="none, or a method that trains beside the weights: lora, mos, lozo, s2ft with method.form: delta",
        )
    if arguments.world_size > 1:
        raise CapabilityError(
            "weights are streamed in one process so far", where=_KEY, got=f"{arguments.world_size} processes"
        )
    if device.type != "cpu":
        raise CapabilityError(
            "weights are streamed where the CPU computes so far",
            where=_KEY,
            got=f"a model on {device.type}",
            fix=f"model.device: cpu, or {_KEY}: none",
        )


def elsewhere_bytes(plan: Plan) -> int:
    """Returns the bytes of the model that are not in memory, buffers subtracted."""
    offload = plan.recipe.engine.offload
    if offload.weights not in STREAMED:
        return 0
    sizes = _frozen_blocks(plan.model)
    return sum(sizes) - (offload.slots * max(sizes) if offload.weights == "disk" else 0)


def recomputes(plan: Plan) -> bool:
    """Returns whether blocks are computed again in the backward pass because their weights are gone by then."""
    return plan.recipe.engine.offload.weights == "disk"


def streaming_lines(plan: Plan) -> list[tuple[str, str]]:
    """Returns what the plan says of it: a label and a text, or nothing."""
    offload = plan.recipe.engine.offload
    if offload.weights == "none":
        return []
    sizes = _frozen_blocks(plan.model)
    kept = (
        f"{offload.slots} in memory at a time, each computed again in the backward pass"
        if recomputes(plan)
        else "paged in by the system"
    )
    return [("offload", f"{len(sizes)} blocks of {max(sizes) / 1e6:.1f} MB stay on disk, {kept}")]


def traffic_lines(streaming: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Returns what the end of a run says of it; of ``mmap`` nothing is known."""
    if streaming is None or not streaming["bytes"]:
        return []
    traffic = Traffic(**streaming)
    rate = traffic.bytes / 1e9 / traffic.seconds
    return [("offload", f"{traffic.bytes / 1e9:.1f} GB read at {rate:.1f} GB/s, {traffic.overlap:.0%} while computing")]


def _frozen_blocks(model: Any) -> list[int]:
    blocks = find_blocks(model).values()
    return [sum(p.nbytes for p in block.parameters() if not p.requires_grad) for block in blocks]
