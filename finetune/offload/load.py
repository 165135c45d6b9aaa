"""Loads a model whose blocks stay on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from finetune.core.errors import CapabilityError, ConfigError
from finetune.models.load import load_config, resolve_dtype, untie
from finetune.models.source import resolve_source
from finetune.offload.blocks import find_blocks
from finetune.offload.files import WeightFiles
from finetune.offload.streamer import BlockStreamer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["load_streamed"]


def load_streamed(
    name_or_path: str,
    *,
    dtype: str = "auto",
    attn_implementation: str = "sdpa",
    revision: str | None = None,
    trust_remote_code: bool = False,
    tied: Literal["keep", "untie"] = "keep",
    source: Literal["disk", "mmap"] = "disk",
    slots: int = 2,
) -> tuple[PreTrainedModel, BlockStreamer]:
    """Returns a causal LM in evaluation mode whose blocks are read as they are computed, on the CPU.

    Embeddings, head and whatever is outside the blocks are in memory. Reading takes the files' bytes as they are, so
    their dtype is the model's.

    Args:
        name_or_path: Hub id, folder, GGUF file or bundled model; with weights in safetensors files.
        dtype: ``auto`` (that of the files), or a torch dtype's name, which must be that of the files.
        attn_implementation: As in transformers.
        revision: Commit or branch of a hub model.
        trust_remote_code: Whether code in the model's repository may run.
        tied: ``untie`` gives the output head its own copy of a shared embedding, and says so in the config.
        source: ``disk`` or ``mmap``, as for :class:`BlockStreamer`.
        slots: Buffers of ``disk``, at least 2.

    Raises:
        ConfigError: The model does not exist, has no safetensors files, or they are of another dtype.
        CapabilityError: It cannot be streamed.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = load_config(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    files = WeightFiles(_folder(resolve_source(name_or_path), revision))
    found = _dtype(files, dtype)
    auto: Any = AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(
            config, dtype=found, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
    _fill(model, files, found)
    if tied == "untie":
        untie(model)
    return model.eval(), BlockStreamer(model, files, source=source, slots=slots)


def _fill(model: Any, files: WeightFiles, dtype: torch.dtype) -> None:
    """Gives every parameter its values: views of the files within blocks, copies elsewhere."""
    model.tie_weights()
    blocks = tuple(f"{name}." for name in find_blocks(model))
    empty = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    missing = [name for name in empty if name not in files.places]
    if missing:
        raise CapabilityError(
            "the files have other names for the weights than the model, so they cannot be streamed",
            where="model.name_or_path",
            got=f"no {', '.join(missing[:3])} among {', '.join(list(files.places)[:3])}, ...",
            fix="engine.offload.weights: none",
        )
    for name, parameter in empty.items():
        view = files.view(name)
        if view.shape != parameter.shape:
            raise ConfigError("the files do not fit the config", where=name, got=str(tuple(view.shape)))
        value = nn.Parameter(view if name.startswith(blocks) else view.to(dtype, copy=True), requires_grad=True)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_parameter(leaf, value)
    model.tie_weights()


def _dtype(files: WeightFiles, dtype: str) -> torch.dtype:
    found = {place.dtype for place in files.places.values()}
    wanted = resolve_dtype(dtype, torch.device("cpu")) if dtype != "auto" else None
    if len(found) != 1 or wanted not in (None, *found):
        names = sorted(str(one).removeprefix("torch.") for one in found)
        raise ConfigError(
            "weights are streamed in the dtype that they are stored in",
            where="model.dtype",
            got=f"{dtype}, and files in {' and '.join(names)}",
            fix=f"model.dtype: {names[0]}" if len(names) == 1 else "convert the files to one dtype",
        )
    return found.pop()


def _folder(source: str, revision: str | None) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, revision=revision, allow_patterns=["*.safetensors", "*.json"]))
