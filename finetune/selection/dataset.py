"""Selection and reflection from Python: a ``datasets.Dataset`` in, the rows to train on out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.load import LoadedRecipe, load_recipe
from finetune.core.errors import TrainingError
from finetune.selection.reflect import reflect
from finetune.selection.reflected import RESULT
from finetune.selection.run import FAILED, INTERRUPTED, SelectionResult, select

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["reflect_dataset", "select_dataset"]


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

    section = {"scorer": scorer if isinstance(scorer, str) else dict(scorer), **rules}
    with _recipe(dataset, model, data, output_dir, {"select": section}) as loaded:
        result = select(loaded, resume=True)
        _check(result, "unscored")
        table = pyarrow.parquet.read_table(result.folder / "scores.parquet", columns=["row", "kept"])
        kept = [row for row, keep in zip(*(table[name].to_pylist() for name in ("row", "kept")), strict=True) if keep]
    return dataset.select(kept)


def reflect_dataset(
    dataset: Dataset,
    *,
    model: str | Mapping[str, Any],
    teacher: str | Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    output_dir: str | Path | None = None,
    **rules: Any,
) -> Dataset:
    """Returns the version of each row of ``dataset`` that is kept; see :func:`finetune.reflect`."""
    import datasets

    who = {"model": teacher} if teacher is None or isinstance(teacher, str) else dict(teacher)
    with _recipe(dataset, model, data, output_dir, {"reflect": {**who, **rules}}) as loaded:
        result = reflect(loaded, resume=True)
        _check(result, "left_out")
        lines = (result.folder / "selected" / RESULT).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    # The source is a folder of this moment, and has no lines.
    return datasets.Dataset.from_list([{k: row[k] for k in row if k not in ("source", "line")} for row in rows])


@contextmanager
def _recipe(
    dataset: Dataset,
    model: str | Mapping[str, Any],
    data: Mapping[str, Any] | None,
    output_dir: str | Path | None,
    sections: Mapping[str, Mapping[str, Any]],
) -> Iterator[LoadedRecipe]:
    """Yields a recipe about the rows of ``dataset``, as long as they are on disk."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows"
        dataset.save_to_disk(str(rows))
        given = {
            "model": {"name_or_path": model} if isinstance(model, str) else dict(model),
            "data": {**(data or {}), "train": str(rows)},
            "output_dir": str(Path(scratch) / "result" if output_dir is None else output_dir),
            **sections,
        }
        yield load_recipe([], [f"{name}={json.dumps(section)}" for name, section in given.items()])


def _check(result: SelectionResult, reasons: str) -> None:
    if result.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    if result.exit_code == FAILED:
        got = str(result.manifest["counts"][reasons])
        raise TrainingError("too many rows could not be measured", where=str(result.folder), got=got)
