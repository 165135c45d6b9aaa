"""Changes of base weights as an adapter that stock PEFT loads: LoRA of whole columns or rows, SHiRA of entries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from finetune.core.errors import CapabilityError
from finetune.core.files import replaced_folder
from finetune.core.learned_state import BASE, DELTA, INDEX, VALUE, learned_names

__all__ = ["WeightChange", "changes_of", "write_stock_adapter"]

_MERGE = "finetune merge RUN OUT"


@dataclass(frozen=True)
class WeightChange:
    """What was learned of one weight.

    Attributes:
        axis: The axis of the stored weight that ``index`` counts along; None for entries of the flattened weight.
        index: Positions, (K,).
        change: Float32; its last dimension is K.
    """

    axis: int | None
    index: Tensor
    change: Tensor


def changes_of(tensors: Mapping[str, Tensor], axes: Mapping[str, int | None]) -> dict[str, WeightChange]:
    """Returns the changes that a learned state holds, by the name of the weight.

    Raises:
        CapabilityError: It holds whole tensors, whose base it does not know.
    """
    changes = {}
    for name in learned_names(tensors):
        if f"{name}{INDEX}" not in tensors:
            raise CapabilityError("a whole tensor was trained, which is no adapter", where=name, fix=_MERGE)
        if f"{name}{DELTA}" in tensors:
            change = tensors[f"{name}{DELTA}"]
        else:
            change = tensors[f"{name}{VALUE}"].float() - tensors[f"{name}{BASE}"].float()
        changes[name] = WeightChange(axes[name], tensors[f"{name}{INDEX}"], change)
    return changes


def write_stock_adapter(
    folder: Path, changes: Mapping[str, WeightChange], model: nn.Module, *, base_model: str
) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors``: LoRA if all changes are slices, else SHiRA.

    Args:
        folder: Replaced whole.
        changes: Weight name -> change.
        model: The base, weights or none: it says what kind of layer each weight belongs to.
        base_model: What the adapter's config calls its base.

    Raises:
        CapabilityError: The changes have no such form.
    """
    layers = {name: _layer(model, name) for name in changes}
    if all(change.axis is not None for change in changes.values()):
        config, tensors = _lora(changes, layers)
    else:
        config, tensors = _shira(changes, layers)
    config.base_model_name_or_path = base_model
    with replaced_folder(folder) as beside:
        config.save_pretrained(str(beside))
        save_file({f"base_model.model.{key}": t.cpu().contiguous() for key, t in tensors.items()}, beside / _TENSORS)


_TENSORS = "adapter_model.safetensors"


def _layer(model: nn.Module, name: str) -> nn.Module:
    layer = model.get_submodule(name.rpartition(".")[0])
    if not name.endswith(".weight") or not isinstance(layer, nn.Linear | Conv1D):
        raise CapabilityError(
            f"stock PEFT has no adapter for this parameter of a {type(layer).__name__}",
            where=name,
            want="weights of nn.Linear or Conv1D",
            fix=_MERGE,
        )
    return layer


def _shape(layer: nn.Module) -> tuple[int, int]:
    weight: Any = layer.weight
    return tuple(weight.shape)


def _lora(changes: Mapping[str, WeightChange], layers: Mapping[str, nn.Module]) -> tuple[Any, dict[str, Tensor]]:
    """Returns LoRA of scale 1 and each layer's own rank: one factor selects the slice, so that ``B A`` is exact."""
    from peft import LoraConfig

    tensors, ranks = {}, {}
    for name, change in changes.items():
        transposed = isinstance(layers[name], Conv1D)
        rows, columns = reversed(_shape(layers[name])) if transposed else _shape(layers[name])
        along_columns = (change.axis == 1) != transposed
        selector = F.one_hot(change.index.long(), columns if along_columns else rows).to(change.change)
        down, up = (selector, change.change) if along_columns else (change.change.t(), selector.t())
        module = name.removesuffix(".weight")
        tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = down, up
        ranks[module] = change.index.numel()
    config = LoraConfig(
        task_type="CAUSAL_LM",
        inference_mode=True,
        r=max(ranks.values()),
        lora_alpha=max(ranks.values()),
        rank_pattern=ranks,
        alpha_pattern=ranks,
        target_modules=sorted(ranks),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
    )
    return config, tensors


def _shira(changes: Mapping[str, WeightChange], layers: Mapping[str, nn.Module]) -> tuple[Any, dict[str, Tensor]]:
    """Returns SHiRA, which has r (M + N) entries in every layer: zeros fill up what was not learned."""
    from peft import ShiraConfig

    flat = {name: _as_entries(change, _shape(layers[name])) for name, change in changes.items()}
    rank = max(math.ceil(index.numel() / sum(_shape(layers[name]))) for name, (index, _) in flat.items())
    tensors = {}
    for name, (index, change) in flat.items():
        layer, shape = layers[name], _shape(layers[name])
        count = rank * sum(shape)
        if isinstance(layer, Conv1D) or count > math.prod(shape):
            raise CapabilityError(
                "stock SHiRA cannot hold these entries",
                where=name,
                got=f"{type(layer).__name__}, {index.numel():,} of {math.prod(shape):,} entries, r = {rank}",
                want="nn.Linear layers, with r (in + out) entries in each",
                fix=_MERGE,
            )
        filled = torch.cat([index, index[:1].expand(count - index.numel())])
        module = name.removesuffix(".weight")
        tensors[f"{module}.shira_indices"] = torch.stack([filled // shape[1], filled % shape[1]]).int()
        tensors[f"{module}.shira_weight"] = F.pad(change, (0, count - change.numel()))
    targets = sorted(name.removesuffix(".weight") for name in flat)
    return ShiraConfig(task_type="CAUSAL_LM", inference_mode=True, r=rank, target_modules=targets), tensors


def _as_entries(change: WeightChange, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns flat positions, int64, and their changes."""
    if change.axis is None:
        return change.index.long(), change.change
    places = torch.arange(math.prod(shape)).reshape(shape).index_select(change.axis, change.index.long())
    return places.movedim(change.axis, -1).reshape(-1), change.change.reshape(-1)
