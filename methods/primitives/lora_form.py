"""Writes low-rank updates of base weights as an adapter that stock PEFT loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from finetune.core.files import replaced_folder

__all__ = ["LowRankUpdate", "slice_update", "write_lora"]


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


def slice_update(
    change: Tensor, index: Tensor, axis: int, sizes: tuple[int, int], *, transposed: bool = False
) -> LowRankUpdate:
    """Returns the change of some columns or rows as a product: one factor selects them.

    Args:
        change: Float32, index last: (M, K) of columns, (N, K) of rows.
        index: The columns or rows, int64 (K,).
        axis: 1 for columns, 0 for rows, of the weight as (out_features, in_features).
        sizes: (M, N).
        transposed: Whether the layer stores its weight as in x out.
    """
    selector = F.one_hot(index, sizes[axis]).to(change)
    if axis == 1:
        return LowRankUpdate(selector, change, transposed)
    return LowRankUpdate(change.t(), selector.t(), transposed)


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
