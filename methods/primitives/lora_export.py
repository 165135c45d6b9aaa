"""A low-rank update as a stock LoRA adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from finetune.core.files import replaced_folder
from finetune.methods.primitives.low_rank_layer import LowRankLayer

__all__ = ["low_rank_layers", "write_lora"]

_ADAPTER = "default"


class HasFactors(Protocol):
    """A layer with a low-rank update."""

    def plain_factors(self, adapter: str) -> tuple[Tensor, Tensor]:
        """Returns A (r, in_features) and B (out_features, r), float32."""


def low_rank_layers(model: Any) -> dict[str, LowRankLayer]:
    """Returns the layers of a ``PeftModel`` that a tuner of ours adapts, by their name in the base."""
    modules = model.base_model.model.named_modules()
    return {name: layer for name, layer in modules if isinstance(layer, LowRankLayer)}


@torch.no_grad()
def write_lora(folder: Path, layers: Mapping[str, HasFactors], alpha: float, *, base_model: str) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors`` of LoRA.

    Args:
        folder: Replaced whole.
        layers: The adapted layers, by their name in the base.
        alpha: Numerator of the scale.
        base_model: What the config calls its base.
    """
    from peft import LoraConfig

    tensors: dict[str, Tensor] = {}
    ranks = {}
    for name, layer in layers.items():
        first, second = layer.plain_factors(_ADAPTER)
        ranks[name] = first.shape[0]
        tensors[f"base_model.model.{name}.lora_A.weight"] = first.cpu().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = second.cpu().contiguous()
    most = max(ranks.values())
    config = LoraConfig(
        r=most,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules=list(ranks),
        rank_pattern={name: rank for name, rank in ranks.items() if rank != most},
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base_model,
    )
    with replaced_folder(folder) as beside:
        config.save_pretrained(str(beside))
        save_file(tensors, beside / "adapter_model.safetensors")
