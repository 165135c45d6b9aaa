"""Files and merging of PEFT adapters: whole or not at all, strict, in float32."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from finetune.core.errors import CapabilityError, CheckpointError
from finetune.core.files import write_json
from finetune.core.learned_state import require_same_shapes
from finetune.methods.primitives.master_weights import autocast_adapters
from finetune.methods.state import METHOD_FILE, read_method_file

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_TENSORS",
    "RESUME_TENSORS",
    "load_adapter",
    "merge_adapter",
    "read_adapter",
    "require_equal",
    "write_adapter",
]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"
RESUME_TENSORS = "method.safetensors"
"""What training needs to go on and using the adapter does not."""


def write_adapter(
    folder: Path,
    model: Any,
    *,
    metadata: Mapping[str, Any] | None = None,
    resume_only: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes the adapter of a PEFT model as stock PEFT does, without a model card.

    Args:
        folder: Made if absent; files of other names in it are left alone.
        model: A ``PeftModel``.
        metadata: What ``method.json`` says; it is written last and marks the rest complete.
        resume_only: Tensors beside the adapter's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".adapter.", dir=folder) as beside:
        model.save_pretrained(beside, save_embedding_layers=False)
        if resume_only:
            save_file(
                {name: tensor.cpu().contiguous() for name, tensor in resume_only.items()}, Path(beside, RESUME_TENSORS)
            )
        # The config comes last: loaders look for it first.
        for name in (RESUME_TENSORS, ADAPTER_TENSORS, ADAPTER_CONFIG):
            if Path(beside, name).is_file():
                Path(beside, name).replace(folder / name)
    if metadata is not None:
        write_json(folder / METHOD_FILE, dict(metadata))


def read_adapter(folder: Path, *, resume_only: bool = False) -> dict[str, Tensor]:
    """Returns the adapter's tensors, or those that only resuming needs.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    name = RESUME_TENSORS if resume_only else ADAPTER_TENSORS
    if not (folder / name).is_file():
        raise CheckpointError(f"{name} is missing", where=str(folder), want="the folder that a run saved")
    try:
        return load_file(folder / name)
    except SafetensorError as error:
        raise CheckpointError(f"{name} is damaged", where=str(folder), got=str(error)) from error


def load_adapter(model: Any, folder: Path) -> nn.Module:
    """Returns ``model`` with the adapter in ``folder``; every tensor of the file is in it, bit for bit.

    Raises:
        CheckpointError: The adapter is damaged, incomplete, or does not fit the model.
    """
    from peft import PeftModel, get_peft_model_state_dict

    import finetune.methods.primitives.mosa_tuner
    import finetune.methods.primitives.shard_tuner
    import finetune.methods.primitives.skill_tuner  # noqa: F401 - PEFT learns of our tuners

    tensors = read_adapter(folder)
    try:
        with warnings.catch_warnings():
            # What PEFT only warns of, missing tensors, is an error below.
            warnings.simplefilter("ignore")
            adapted = PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            "PEFT cannot load the adapter", where=str(folder), got=" ".join(str(error).split())
        ) from error
    loaded = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    require_same_shapes(loaded, tensors)
    require_equal(loaded, tensors)
    configs = read_method_file(folder).get("config", {})
    if any(config.get("compute_dtype") == "base" for config in (configs if isinstance(configs, list) else [configs])):
        autocast_adapters(adapted, next(model.parameters()).dtype)
    return cast(nn.Module, adapted)


def require_equal(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Checks that ``own`` has every value of ``state``: PEFT drops what it cannot place.

    Raises:
        CheckpointError: It has not.
    """
    lost = [name for name, tensor in state.items() if not torch.equal(own[name], tensor.to(own[name]))]
    if lost:
        raise CheckpointError(
            "PEFT did not load these tensors of the adapter", where=", ".join(lost[:4]), got=f"{len(lost)} tensors"
        )


def merge_adapter(model: Any, base_dtypes: Mapping[str, torch.dtype]) -> nn.Module:
    """Adds the adapter's update to the base weights in float32, rounds once to ``base_dtypes``, returns the base model.

    Args:
        model: A ``PeftModel``; it is taken apart.
        base_dtypes: Dtype of each parameter of the plain base model, by name; none leaves the sums in float32.

    Raises:
        CapabilityError: The adapter cannot be expressed as weights; ``model`` has its dtypes again.
    """
    name = str(model.active_peft_config.peft_type.value).lower()
    if model.active_peft_config.is_prompt_learning or not hasattr(model.base_model, "merge_and_unload"):
        raise _no_merge(name, "PEFT has no way to")
    narrow = [(p, p.dtype) for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    for parameter, _ in narrow:
        parameter.data = parameter.data.float()
    try:
        merged = cast(nn.Module, model.merge_and_unload())
    except (NotImplementedError, ValueError, TypeError) as error:
        for parameter, dtype in narrow:
            parameter.data = parameter.data.to(dtype)
        raise _no_merge(name, " ".join(str(error).split()) or type(error).__name__) from error
    own_dtype = next(iter(base_dtypes.values()), torch.float32)
    for name, parameter in merged.named_parameters():
        parameter.data = parameter.data.to(base_dtypes.get(name, own_dtype))
    return merged


def _no_merge(name: str, reason: str) -> CapabilityError:
    return CapabilityError(
        f"{name} does not change weights alone, so it cannot be merged",
        got=reason,
        fix="keep the adapter: finetune.load(base, folder), or stock PEFT",
    )
