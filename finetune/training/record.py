"""``run.json``: what was run, on what, and what came out; written at every change of the run's status."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.files import write_json
from finetune.environment import toolkit_version
from finetune.training.output_folder import RECORD, launch_id, read_record

if TYPE_CHECKING:
    from finetune.config.schema import Recipe

__all__ = ["RunRecord", "as_recorded"]

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors")


def as_recorded(recipe: Recipe, run: Path) -> Recipe:
    """Returns the recipe with the dtype and the attention that an earlier run settled on in place of ``auto``."""
    recorded = read_record(run).get("model", {})
    automatic = [key for key in ("dtype", "attn_implementation") if getattr(recipe.model, key) == "auto"]
    settled = {key: recorded[key] for key in automatic if key in recorded}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=settled)})


class RunRecord:
    """The content of ``run.json``.

    Args:
        run: The run directory.
        fields: What is known at the start; more comes through :meth:`update`.
    """

    def __init__(self, run: Path, fields: dict[str, Any]) -> None:
        self._file = run / RECORD
        self.fields: dict[str, Any] = {
            "status": "running",
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "ended": None,
            "seconds": None,
            "argv": sys.argv,
            "launch": launch_id(),
            "finetune": toolkit_version(),
            "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
            "python": platform.python_version(),
            "warnings": [],
            "error": None,
            **fields,
        }

    def update(self, **fields: Any) -> None:
        """Sets fields and writes the file."""
        self.fields.update(fields)
        write_json(self._file, self.fields)

    def end(self, status: str, **fields: Any) -> None:
        """Sets the status and the time of the end, and writes the file."""
        self.update(status=status, ended=datetime.now(UTC).isoformat(timespec="seconds"), **fields)
