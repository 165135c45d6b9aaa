"""The file form of what in-place methods learn: entries, slices or whole tensors of the base's own weights.

``delta_config.json`` says which method, config and base; ``delta.safetensors`` holds, per base tensor ``NAME``:

* ``NAME.value``: the trained values, in the dtype that was trained (a float32 master of a bfloat16 weight);
* ``NAME.index`` (absent for whole tensors): int32 positions along ``axis`` of the base tensor, sorted;
* ``NAME.base`` (with an index only): the base's values at those positions, in the base's dtype, which makes undoing
  bit-exact and shows whether a base is the right one.

``delta_config.json["axes"]`` maps each indexed tensor to its axis.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.errors import CheckpointError
from finetune.core.files import replaced_file, write_json

if TYPE_CHECKING:
    import torch

__all__ = ["DELTA_CONFIG", "DELTA_TENSORS", "narrowest_exact", "read_learned_state", "require_same_method", "write_learned_state"]

DELTA_CONFIG = "delta_config.json"
DELTA_TENSORS = "delta.safetensors"


def write_learned_state(folder: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
    """Writes ``tensors`` and ``metadata`` into ``folder``; the config comes last and marks the pair complete."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with replaced_file(folder / DELTA_TENSORS) as beside:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, beside)
    write_json(folder / DELTA_CONFIG, metadata)


def read_learned_state(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the tensors and the metadata that :func:`write_learned_state` wrote.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in (DELTA_CONFIG, DELTA_TENSORS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{name} is missing", where=str(folder), want="the folder that a run saved")
    try:
        metadata = json.loads((folder / DELTA_CONFIG).read_text(encoding="utf-8"))
        return load_file(folder / DELTA_TENSORS), metadata
    except (SafetensorError, ValueError) as error:
        raise CheckpointError("the learned state is damaged", where=str(folder), got=str(error)) from error


def narrowest_exact(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` in bfloat16 where that loses no bit (a 16-bit base that was loaded in float32), else itself."""
    import torch

    narrow = tensor.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def require_same_method(own: dict[str, Any], stored: dict[str, Any], folder: Path) -> None:
    """Checks that a learned state belongs to this method, config and base.

    Raises:
        CheckpointError: It does not; the error names the first field that differs.
    """
    for field in ("method", "config", "base_fingerprint"):
        if own[field] != stored.get(field):
            raise CheckpointError(
                f"the learned state has another {field.replace('_', ' ')}",
                where=str(folder),
                got=str(stored.get(field)),
                want=str(own[field]),
            )
