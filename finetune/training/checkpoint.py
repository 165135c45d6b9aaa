"""Checkpoints that appear whole or not at all, and that say which run they belong to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from finetune.core.errors import CheckpointError, Problem
from finetune.core.files import fsync_folder, incomplete_reason, write_json, write_manifest

__all__ = [
    "IDENTITY",
    "check_identity",
    "complete_checkpoint",
    "list_checkpoints",
    "newest_complete",
    "rotate",
    "verify_tensors",
]

IDENTITY = "identity.json"
"""What must be the same for a run to go on from a checkpoint, field by field."""
_PREFIX = "checkpoint-"


def list_checkpoints(run: Path) -> list[Path]:
    """Returns the ``checkpoint-{step}`` folders of a run, complete or not, oldest step first."""
    found = [path for path in run.glob(f"{_PREFIX}*") if path.is_dir() and path.name[len(_PREFIX) :].isdigit()]
    return sorted(found, key=lambda path: int(path.name[len(_PREFIX) :]))


def newest_complete(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """Returns the newest complete checkpoint, or None, and why each newer one was passed over."""
    skipped: dict[Path, str] = {}
    for path in reversed(list_checkpoints(run)):
        reason = incomplete_reason(path)
        if not reason:
            return path, skipped
        skipped[path] = reason
    return None, skipped


def verify_tensors(folder: Path, *, at_least: int) -> None:
    """Re-opens the learned state in ``folder`` and checks that it holds what was learned.

    Args:
        folder: A checkpoint that was just written.
        at_least: Scalars that must be in it.

    Raises:
        CheckpointError: A tensor is empty or not finite, or fewer scalars than trained are there.
    """
    import torch
    from safetensors import safe_open

    scalars = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                tensor = tensors.get_tensor(name)
                if tensor.numel() == 0 or (tensor.is_floating_point() and not torch.isfinite(tensor).all()):
                    raise CheckpointError("the checkpoint holds an empty or non-finite tensor", where=f"{file}: {name}")
                scalars += tensor.numel()
    if scalars < at_least:
        raise CheckpointError(
            "the checkpoint holds less than what was trained",
            where=str(folder),
            got=f"{scalars} scalars",
            want=f"{at_least}",
        )


def complete_checkpoint(staged: Path, run: Path, identity: dict[str, Any]) -> Path:
    """Marks a verified checkpoint as complete and moves it from ``staged`` into the run; returns its place."""
    write_json(staged / IDENTITY, identity)
    write_manifest(staged)
    fsync_folder(staged)
    place = run / staged.name
    if place.exists():
        shutil.rmtree(place)
    staged.replace(place)
    fsync_folder(run)
    return place


def rotate(run: Path, *, keep: int | None, best: str | None) -> None:
    """Deletes all but the newest ``keep`` checkpoints; the best one is kept besides."""
    if keep is None:
        return
    for path in list_checkpoints(run)[:-keep]:
        if best is None or path.resolve() != Path(best).resolve():
            shutil.rmtree(path)


def check_identity(checkpoint: Path, identity: dict[str, Any]) -> None:
    """Refuses to resume another run.

    Raises:
        CheckpointError: A field of the identity differs; all differences are reported.
    """
    recorded: dict[str, Any] = json.loads((checkpoint / IDENTITY).read_text(encoding="utf-8"))
    problems = [
        Problem(
            f"the checkpoint was made with another {field.replace('_', ' ')}",
            where=str(checkpoint),
            got=str(value),
            want=str(recorded.get(field)),
            fix="the recipe that the run was started with, or another output_dir",
        )
        for field, value in identity.items()
        if recorded.get(field) != value
    ]
    if problems:
        raise CheckpointError.of(problems)
