"""Which files mark a folder that holds a method's learned state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.core.errors import CheckpointError
from finetune.core.learned_state import DELTA_CONFIG

__all__ = ["METHOD_FILE", "has_method_state", "read_method_file"]

METHOD_FILE = "method.json"
"""Beside the adapter files of PEFT: what :meth:`finetune.methods.Method.metadata` says."""


def has_method_state(folder: Path) -> bool:
    """Returns whether :meth:`finetune.methods.Method.save` wrote into ``folder``; its metadata file comes last."""
    return any((folder / name).is_file() for name in (METHOD_FILE, DELTA_CONFIG))


def read_method_file(folder: Path) -> dict[str, Any]:
    """Returns the metadata beside an adapter, empty where stock PEFT wrote the adapter.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = folder / METHOD_FILE
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except ValueError as error:
        raise CheckpointError(f"{METHOD_FILE} is damaged", where=str(folder), got=str(error)) from error
