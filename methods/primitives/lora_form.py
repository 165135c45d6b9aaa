"""Writes low-rank updates of base weights as an adapter that stock PEFT loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from finetune.core.files import replaced_folder

__all__ = ["LowRankUpdate", "write_lora"]


@dataclass(frozen=True)
class LowRankUpdate:
    """The change ``up @ down`` of one linear layer.

    Attributes:
        down: ``lora_A``, (R, in_features).
        up: ``lora_B``, (out_features, R).
        transposed: Whether the layer stores its weight as in x out (``Conv1D``).
    """

    down: Tensor
    up: Tensor
    transposed: bool = False


def write_lora(folder: Path, updates: dict[str, LowRankUpdate], *, base_model: str) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors`` with scale 1 and each layer's own rank."""
    from peft import LoraConfig

    ranks = {name: update.down.shape[0] for name, update in updates.items()}
    config = LoraConfig(
        base_model_name_or_path=base_model,
        task_type="CAUSAL_LM",
        inference_mode=True,
        r=max(ranks.values()),
        lora_alpha=max(ranks.values()),
        rank_pattern=ranks,
        alpha_pattern=ranks,
        target_modules=sorted(updates),
        fan_in_fan_out=any(update.transposed for update in updates.values()),
    )
    tensors = {}
    for name, update in updates.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = update.down.cpu().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = update.up.cpu().contiguous()
    with replaced_folder(folder) as beside:
        config.save_pretrained(str(beside))
        save_file(tensors, beside / "adapter_model.safetensors")
