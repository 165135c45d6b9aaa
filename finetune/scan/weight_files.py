"""The weights of a model, read one at a time from its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.errors import ConfigError
from finetune.models.source import resolve_source

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["weight_readers"]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def weight_readers(name_or_path: str, *, revision: str | None = None) -> dict[str, Callable[[], Tensor]]:
    """Returns name -> what reads that tensor, in its stored dtype, for all tensors of a model, in the files' order.

    Raises:
        ConfigError: The model does not exist, has no safetensors files, or one is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    folder = _folder(resolve_source(name_or_path), revision)
    readers: dict[str, Callable[[], Tensor]] = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                "a file of the model's weights is missing or damaged", where=str(file), got=str(error)
            ) from error
        readers |= {name: partial(_read, file, name) for name in names}
    if not readers:
        raise ConfigError(
            "the model has no safetensors files, which are read one weight at a time",
            where=str(folder),
            want=f"{_SINGLE}, or {_INDEX} with its shards",
            fix="load it with transformers and save it: model.save_pretrained(FOLDER)",
        )
    return readers


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return [folder / _SINGLE] if (folder / _SINGLE).is_file() else []
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("the index of the model's weights is damaged", where=str(index), got=str(error)) from error
    return [folder / shard for shard in dict.fromkeys(shards)]


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        tensor: Any = opened.get_tensor(name)
    return tensor  # type: ignore[no-any-return]


def _folder(source: str, revision: str | None) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=["*.safetensors", "*.json"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError("the model cannot be reached", where=source, got=" ".join(str(error).split())) from error
