"""A selection from Python: a ``datasets.Dataset`` in, the rows worth training on out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.load import load_recipe
from finetune.core.errors import TrainingError
from finetune.selection.run import FAILED, select

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["select_dataset"]


def select_dataset(
    dataset: Dataset,
    scorer: str | Mapping[str, Any],
    *,
    model: str | Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
    output_dir: str | Path | None = None,
    **rules: Any,
) -> Dataset:
    """Returns the rows of ``dataset`` that are kept, in their order; see :func:`finetune.select`."""
    import pyarrow.parquet

    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows"
        dataset.save_to_disk(str(rows))
        folder = Path(scratch) / "selection" if output_dir is None else Path(output_dir)
        sections = {
            "model": {"name_or_path": model} if isinstance(model, str) else dict(model),
            "data": {**(data or {}), "train": str(rows)},
            "select": {"scorer": scorer if isinstance(scorer, str) else dict(scorer), **rules},
            "output_dir": str(folder),
        }
        loaded = load_recipe([], [f"{name}={json.dumps(section)}" for name, section in sections.items()])
        result = select(loaded, resume=True)
        if result.exit_code == FAILED:
            reasons = result.manifest["counts"]["unscored"]
            raise TrainingError("too many rows could not be measured", where=str(folder), got=str(reasons))
        table = pyarrow.parquet.read_table(folder / "scores.parquet", columns=["row", "kept"])
        kept = [row for row, keep in zip(*(table[name].to_pylist() for name in ("row", "kept")), strict=True) if keep]
    return dataset.select(kept)
