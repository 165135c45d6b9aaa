"""The file form of what in-place methods learn: entries, slices or whole tensors of the base's own weights.

``delta_config.json`` says which method, config and base; ``delta.safetensors`` holds, per base tensor ``NAME``:

* ``NAME.value``: the trained values, in the dtype that was trained (a float32 master of a bfloat16 weight);
* ``NAME.index`` (absent for whole tensors): positions along ``axis`` of the base tensor, int32 (int64 where a tensor
  needs it), sorted; value and base have them as their last dimension;
* ``NAME.base`` (with an index only): the base's values at those positions, in the base's dtype, which makes undoing
  bit-exact and shows whether a base is the right one;
* ``NAME.delta`` (instead of value and base): the change of those values, float32, learned beside a base whose weights
  cannot be read (a quantised one); it fits any base;
* ``NAME.left`` (instead of all these): the left factor of a low-rank change, float32 (out_features, rank), that stays
  beside the base; the method's seed makes the right one;
* ``training/...``: what only going on with the training needs.

``delta_config.json["axes"]`` maps each indexed tensor to its axis; null means that the positions count the entries of
the flattened (row-major) tensor. ``["shapes"]`` has the shapes of these tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.errors import CheckpointError
from finetune.core.files import replaced_file, write_json

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "BASE",
    "DELTA",
    "DELTA_CONFIG",
    "DELTA_TENSORS",
    "FOLLOWERS",
    "INDEX",
    "LEFT",
    "TRAINING",
    "VALUE",
    "apply_learned_state",
    "learned_names",
    "narrowest_exact",
    "read_learned_state",
    "require_same_method",
    "require_same_shapes",
    "write_learned_state",
]

DELTA_CONFIG = "delta_config.json"
DELTA_TENSORS = "delta.safetensors"
FOLLOWERS = "followers"
"""In the metadata: settings of methods that trained what this one chose."""
VALUE, INDEX, BASE, DELTA, LEFT, TRAINING = ".value", ".index", ".base", ".delta", ".left", "training/"


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


def learned_names(tensors: Iterable[str]) -> list[str]:
    """Returns the base tensors that the keys of a learned state are about, sorted."""
    return sorted({key.rpartition(".")[0] for key in tensors if not key.startswith(TRAINING)})


def narrowest_exact(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` in bfloat16 where that loses no bit (a 16-bit base loaded in float32), else itself."""
    import torch

    narrow = tensor.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def require_same_method(own: dict[str, Any], stored: dict[str, Any], folder: Path) -> None:
    """Checks that a learned state belongs to this method, config and base.

    Raises:
        CheckpointError: It does not; the error names the first field that differs.
    """
    for field in ("method", "config", FOLLOWERS, "base_fingerprint"):
        if own.get(field) != stored.get(field):
            raise CheckpointError(
                f"the learned state has another {field.replace('_', ' ')}",
                where=str(folder),
                got=str(stored.get(field)),
                want=str(own[field]),
            )


def require_same_shapes(own: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    """Checks that ``state`` has just the tensors of ``own``, each of its shape.

    Raises:
        CheckpointError: It has not; the error counts and names what is missing, unexpected and of another shape.
    """
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    reshaped = [name for name in own.keys() & state.keys() if own[name].shape != state[name].shape]
    wrong = [*missing, *unexpected, *reshaped]
    if wrong:
        raise CheckpointError(
            "the learned state does not fit what the method trains",
            where=", ".join(wrong[:4]),
            got=f"{len(missing)} tensors missing, {len(unexpected)} unexpected, {len(reshaped)} of another shape",
            fix="attach with the config and base that the state was trained with",
        )


def apply_learned_state(
    model: nn.Module, tensors: dict[str, torch.Tensor], metadata: dict[str, Any], folder: Path
) -> None:
    """Writes learned values into the weights of a plain base model, rounded once to their dtype.

    Args:
        model: The base that the state was trained on, in any dtype.
        tensors: As :func:`read_learned_state` returns them.
        metadata: Likewise.
        folder: Where they come from, for messages.

    Raises:
        CheckpointError: The base lacks a tensor or has other values where the state has been trained; nothing was
            written then.
    """
    import torch

    parameters = dict(model.named_parameters())
    writes = []
    for name in learned_names(tensors):
        if name not in parameters or not {f"{name}{VALUE}", f"{name}{DELTA}"} & tensors.keys():
            raise CheckpointError(
                "the learned state does not fit the base model",
                where=str(folder),
                got=f"{name}, which is no parameter of {type(model).__name__} or has no value",
            )
        writes.append(_placed(f"{folder}: {name}", parameters[name].detach(), name, tensors, metadata))
    with torch.no_grad():
        for weight, axis, index, value in writes:
            if index is None:
                weight.copy_(value)
            else:
                weight.index_copy_(axis, index, value)


def _placed(
    where: str, weight: torch.Tensor, name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]
) -> tuple[torch.Tensor, int, torch.Tensor | None, torch.Tensor]:
    """Returns what is written where: a view of the weight, an axis, positions along it (None: all), and values."""
    import torch

    index, axis = tensors.get(f"{name}{INDEX}"), metadata.get("axes", {}).get(name)
    if index is None:
        value = tensors[f"{name}{VALUE}"].to(weight)
        _require_shape(where, weight, value)
        return weight, 0, None, value
    if axis is None:
        weight, axis = weight.view(-1), 0
    index = index.to(weight.device, torch.int64)
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < weight.shape[axis]):
        raise CheckpointError(
            "a learned position lies outside the base's tensor",
            where=where,
            got=f"{int(index.min())} to {int(index.max())}",
            want=f"0 to {weight.shape[axis] - 1}",
        )
    here = weight.index_select(axis, index)
    if f"{name}{DELTA}" in tensors:
        delta = tensors[f"{name}{DELTA}"].to(weight.device).movedim(-1, axis)
        _require_shape(where, here, delta)
        return weight, axis, index, (here.float() + delta).to(weight.dtype)
    base, value = (tensors[f"{name}{part}"].to(weight.device).movedim(-1, axis) for part in (BASE, VALUE))
    _require_shape(where, here, value)
    # A base that is stored wider than it was trained in is the same base, rounded.
    if not torch.equal(here.to(base.dtype), base):
        raise CheckpointError(
            "the learned state belongs to another base model, or to this one in another dtype",
            where=where,
            got=str(weight.dtype).removeprefix("torch."),
            want=f"the base it was trained on, in {metadata.get('base_dtype', 'its dtype')}",
        )
    return weight, axis, index, value.to(weight.dtype)


def _require_shape(where: str, weight: torch.Tensor, value: torch.Tensor) -> None:
    if weight.shape != value.shape:
        raise CheckpointError(
            "a learned tensor has another shape than the base's",
            where=where,
            got=str(tuple(value.shape)),
            want=str(tuple(weight.shape)),
        )
