"""The safetensors files of a model: where each tensor lies, and views of them that the system pages in and out."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from finetune.core.errors import ConfigError

__all__ = ["Place", "WeightFiles"]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Attributes:
        file: The file.
        offset: Its first byte there.
        size: Its bytes.
        dtype: As in the file.
        shape: As in the file.
    """

    file: Path
    offset: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightFiles:
    """The weights of a model folder, by the names of its parameters; they are only read.

    Args:
        folder: With ``model.safetensors``, or with an index and the files that it names.

    Raises:
        ConfigError: There are no such files.
    """

    def __init__(self, folder: Path) -> None:
        self.places = {name: place for file in _files(folder) for name, place in _read_header(file).items()}
        self._open = {file: safe_open(file, framework="pt") for file in {place.file for place in self.places.values()}}
        self._descriptors = {file: os.open(file, os.O_RDONLY) for file in self._open}

    def close(self) -> None:
        """Closes the files; views stay valid."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def view(self, name: str) -> Tensor:
        """Returns the tensor as a view of the mapped file: its pages are read when they are looked at."""
        tensor: Tensor = self._open[self.places[name].file].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def read(self, name: str, into: Tensor) -> None:
        """Reads a tensor's bytes.

        Args:
            name: Of the tensor.
            into: uint8, contiguous, of its size, on the CPU.
        """
        place, target = self.places[name], into.numpy().data
        done = 0
        while done < place.size:
            read = os.preadv(self._descriptors[place.file], [target[done:]], place.offset + done)
            if read == 0:
                raise OSError(f"{place.file} ends within {name}")
            done += read

    def announce(self, names: Iterable[str]) -> None:
        """Has the system read tensors into its page cache while others compute."""
        for place in map(self.places.__getitem__, names):
            os.posix_fadvise(self._descriptors[place.file], place.offset, place.size, os.POSIX_FADV_WILLNEED)


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in named]
    if not (folder / _SINGLE).is_file():
        raise ConfigError(
            "weights are streamed from safetensors files, and the folder has none",
            where="model.name_or_path",
            got=str(folder),
            want=f"{_SINGLE}, or {_INDEX} and the files that it names",
            fix="load the model with transformers and call save_pretrained, once",
        )
    return [folder / _SINGLE]


def _read_header(file: Path) -> dict[str, Place]:
    """Returns the places of a file's tensors: it begins with the length of a JSON object that says them."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    places = {}
    for name, about in header.items():
        start, end = about["data_offsets"]
        if about["dtype"] in _DTYPES:
            places[name] = Place(file, 8 + length + start, end - start, _DTYPES[about["dtype"]], tuple(about["shape"]))
    return places
