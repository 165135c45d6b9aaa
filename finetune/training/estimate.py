"""The memory estimate of a plan whose method is attached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from finetune.models.dtype import resolve_device
from finetune.offload.spill import IN_FLIGHT
from finetune.planning.host import available_memory, resident_bytes
from finetune.planning.memory import MemoryEstimate, estimate_memory
from finetune.training.loss import CHUNK
from finetune.training.streaming import elsewhere_bytes, recomputes

if TYPE_CHECKING:
    from finetune.config.schema import Recipe
    from finetune.training.plan import Plan

__all__ = ["estimate_plan", "estimate_recipe"]


def estimate_recipe(recipe: Recipe) -> MemoryEstimate:
    """Returns the estimated peak of a recipe's training step; all of its rows are read, and none of its weights.

    Raises:
        FinetuneError: Whatever is wrong with the recipe, the data, the model or the method.
    """
    from finetune.training.plan import make_plan

    plan = make_plan(recipe, meta=True)
    plan.attach()
    return estimate_plan(plan)


def estimate_plan(plan: Plan) -> MemoryEstimate:
    """Returns the estimated peak of a training step; the longest example decides the length of a row (P15)."""
    model: Any = plan.model
    arguments = plan.arguments
    attached = plan.method.model
    tensors = [*attached.parameters(), *attached.buffers()]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors) - elsewhere_bytes(plan)
    summary = plan.method.summary()
    trained_bytes = summary.trained_bytes
    length = max(plan.train.dataset["length"])
    rows = arguments.per_device_train_batch_size
    device = resolve_device(plan.recipe.model.device)
    on_cpu = device.type == "cpu"
    return estimate_memory(
        model.config,
        trained=plan.method.trained_shapes(),
        trained_count=summary.trained,
        frozen_bytes=weights - trained_bytes,
        trained_bytes=trained_bytes,
        weight_dtype=str(model.dtype).removeprefix("torch."),
        micro_batch=rows,
        length=length,
        checkpointing=arguments.activation_checkpointing is True or recomputes(plan),
        in_flight=None if plan.recipe.engine.offload.activations == "none" else IN_FLIGHT,
        attn_implementation=model.config._attn_implementation,
        method_kind=plan.method.kind,
        label_tokens=rows * plan.train.longest_labels,
        logits_chunk=CHUNK,
        accumulation=arguments.gradient_accumulation_steps,
        optimizer=str(arguments.optim),
        process_bytes=max(0, resident_bytes() - (weights if model.device.type == "cpu" else 0)) if on_cpu else 0,
        available=None if on_cpu else available_memory(str(device)) + torch.cuda.memory_allocated(),
    )
