"""The run directory: whether a run may use it, and what of an earlier run has to go."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from finetune.core.errors import CheckpointError, FinetuneWarning, RefusedError
from finetune.planning.host import free_disk
from finetune.training.checkpoint import newest_complete

__all__ = [
    "RECORD",
    "check_disk",
    "check_output",
    "checkpoint_to_resume",
    "clear_output",
    "launch_id",
    "read_record",
    "started_again",
]

RECORD = "run.json"


def read_record(run: Path) -> dict[str, Any]:
    """Returns the content of ``run.json``; nothing where there is none."""
    file = run / RECORD
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def launch_id() -> str:
    """Returns what torchrun calls the launch that this process belongs to, or an empty string."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def started_again(run: Path) -> bool:
    """Returns whether torchrun starts the processes anew after one of them died, and ``run`` is what they had begun."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return restarts != "0" and read_record(run).get("launch") == launch_id()


def check_output(run: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuses an output directory that a run must not write to; changes nothing (P16).

    Raises:
        RefusedError: The directory is not empty, not a run's, not a directory, or cannot be written to.
    """
    where = f"output_dir: {run}"
    if run.exists() and not run.is_dir():
        raise RefusedError("the output directory is a file", where=where, fix="output_dir=ANOTHER")
    existing = next(folder for folder in (run, *run.absolute().parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        raise RefusedError("the output directory cannot be written to", where=where, got=f"{existing} is read-only")
    if resume or not run.exists() or not any(run.iterdir()):
        return
    if not (run / RECORD).is_file():
        raise RefusedError(
            "the output directory holds files that are not a run's", where=where, fix="output_dir=ANOTHER"
        )
    if not overwrite:
        raise RefusedError(
            "the output directory holds an earlier run",
            where=where,
            fix="--resume to go on with it, --overwrite to replace it, or output_dir=ANOTHER",
        )


def clear_output(run: Path) -> None:
    """Removes what an earlier run left in ``run`` and makes the directory."""
    run.mkdir(parents=True, exist_ok=True)
    for entry in run.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def check_disk(run: Path, *, checkpoint_bytes: int, checkpoints: int | None) -> None:
    """Refuses a run whose checkpoints do not fit on the disk (P16).

    Args:
        run: The run directory.
        checkpoint_bytes: Size of one checkpoint.
        checkpoints: ``save_total_limit``; None counts as one. One more exists while it is written, and the final state.

    Raises:
        RefusedError: There is not enough room.
    """
    needed = ((checkpoints or 1) + 2) * checkpoint_bytes
    free = free_disk(run)
    if needed > free:
        raise RefusedError(
            "not enough disk for the checkpoints",
            where=f"output_dir: {run}",
            got=f"{free / 1e9:.2f} GB free",
            want=f"{needed / 1e9:.2f} GB",
            fix="a lower train.save_total_limit, train.save_only_model: true, or another output_dir",
        )


def checkpoint_to_resume(run: Path, resume: str | None) -> Path | None:
    """Returns the checkpoint that ``--resume`` names: ``last`` is the newest complete one of ``run``.

    Raises:
        CheckpointError: There is none, or the named one is damaged.
    """
    import warnings

    from finetune.core.files import incomplete_reason

    if resume is None:
        return None
    if resume != "last":
        reason = incomplete_reason(Path(resume))
        if reason:
            raise CheckpointError("the checkpoint is damaged", where=resume, got=reason, fix="--resume last")
        return Path(resume)
    newest, skipped = newest_complete(run)
    for path, reason in skipped.items():
        warnings.warn(
            f"{path.name} is not complete ({reason}), so the run goes on from an earlier checkpoint",
            FinetuneWarning,
            stacklevel=2,
        )
    if newest is None:
        if skipped:
            raise CheckpointError(
                "no checkpoint of the run is complete", where=str(run), fix="--overwrite to start anew"
            )
        if not (run / RECORD).is_file():
            raise CheckpointError("there is no run to resume", where=str(run), fix="finetune train without --resume")
    return newest
