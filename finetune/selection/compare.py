"""Does a selection help? The same training on the rows of several scorers, and on all rows, measured alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.load import LoadedRecipe, load_recipe
from finetune.core.errors import ConfigError, RefusedError
from finetune.core.files import write_json, write_text
from finetune.core.registry import canonical_name
from finetune.report.comparison import write_comparison
from finetune.training.output_folder import RECORD
from finetune.training.run import INTERRUPTED, train

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["BASE", "FULL", "Comparison", "compare"]

BASE, FULL = "untouched model", "all rows"
_RECIPE, _RESULT, _PICTURE = "compare.yaml", "compare.json", "compare.png"


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Attributes:
        folder: Where it lies: the run of each entry, table and picture.
        rows: Per entry ``name``, ``rows``, ``tokens``, ``steps``, ``run`` and ``results``, the untouched model first.
        ended: ``complete`` or ``interrupted``.
    """

    folder: Path
    rows: list[dict[str, Any]]
    ended: str

    @property
    def exit_code(self) -> int:
        """0, or 130 after a signal."""
        return 0 if self.ended == "complete" else INTERRUPTED


def compare(
    loaded: LoadedRecipe, *, resume: bool = False, overwrite: bool = False, console: Console | None = None
) -> Comparison:
    """Trains on all rows and on what each scorer keeps, by one recipe, and measures every model.

    A run that is complete is not made again, one that was interrupted goes on. All subsets have the same limits; a
    scorer that excludes rows may keep fewer.

    Args:
        loaded: A recipe with ``select`` and ``eval.tasks``.
        resume: Goes on with an earlier comparison in the output directory.
        overwrite: Replaces it.
        console: Where progress goes.

    Raises:
        ConfigError: There is nothing to measure the models by.
        RefusedError: The output directory is taken, or the recipe is another than that of the comparison to go on with.
    """
    if not loaded.recipe.eval.tasks:
        raise ConfigError(
            "a comparison needs something to measure the models by", where="eval.tasks", want="tasks, as for training"
        )
    folder = Path(loaded.recipe.output_dir)
    _prepare(folder, loaded, resume=resume, overwrite=overwrite)
    rows: list[dict[str, Any]] = []
    for name, overrides in _entries(loaded).items():
        record = _train(folder, name, overrides, first=not rows, console=console)
        if record.get("status") != "completed":
            return Comparison(folder, rows, "interrupted")
        if not rows:
            rows.append(_row(BASE, folder, record, "before"))
        rows.append(_row(name, folder / _slug(name), record, "after"))
        write_json(folder / _RESULT, rows)
    results = {row["name"]: row["results"] for row in rows}
    write_comparison(folder / _PICTURE, results, title=f"{folder.absolute().name} · by what the rows were chosen")
    return Comparison(folder, rows, "complete")


def _entries(loaded: LoadedRecipe) -> dict[str, list[str]]:
    """Returns what each model is called, and how its recipe differs from the given one."""
    entries = {FULL: ["data.selection=false"]}
    for scorer in [loaded.recipe.select.scorer, *loaded.recipe.select.compare]:
        given = {"name": scorer} if isinstance(scorer, str) else dict(scorer)
        own = [f"{key} {value}" for key, value in given.items() if key != "name"]
        name = ", ".join([canonical_name(str(given["name"])), *own])
        entries[name] = ["data.selection=true", f"select.scorer={json.dumps(given)}"]
    return entries


def _slug(name: str) -> str:
    """Returns a name for a folder."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)


def _prepare(folder: Path, loaded: LoadedRecipe, *, resume: bool, overwrite: bool) -> None:
    recipe, text = folder / _RECIPE, loaded.resolved_yaml()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        where = f"output_dir: {folder}"
        if not recipe.is_file():
            raise RefusedError("the output directory holds files that are not a comparison's", where=where)
        if not resume and not overwrite:
            raise RefusedError("the output directory holds a comparison", where=where, fix="--resume or --overwrite")
        if resume and recipe.read_text(encoding="utf-8") != text:
            raise RefusedError(
                "the earlier comparison is that of another recipe", where=str(recipe), fix="the same, or --overwrite"
            )
        if overwrite:
            for name in _entries(loaded):
                for made in (folder / _slug(name), folder / f"{_slug(name)}-selection"):
                    shutil.rmtree(made, ignore_errors=True)
    write_text(recipe, text)


def _train(folder: Path, name: str, overrides: list[str], *, first: bool, console: Console | None) -> Mapping[str, Any]:
    run = folder / _slug(name)
    record = run / RECORD
    if record.is_file():
        known: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        if known.get("status") == "completed":
            return known
    if run.exists() and not record.is_file():
        shutil.rmtree(run)  # killed before it began
    # The untouched model is the same for all: it is measured once.
    overrides = [*overrides, f"output_dir={json.dumps(str(run))}", f"eval.before={json.dumps(first)}"]
    if console is not None:
        console.print(f"\n{name}", highlight=False, markup=False)
    loaded = load_recipe([str(folder / _RECIPE)], overrides)
    return train(loaded, resume="last" if run.exists() else None, console=console).record


def _row(name: str, run: Path, record: Mapping[str, Any], moment: str) -> dict[str, Any]:
    trained = name != BASE
    return {
        "name": name,
        "rows": record["data"]["examples"] if trained else 0,
        "tokens": record["data"]["tokens"] if trained else 0,
        "steps": record["final"]["steps"] if trained else 0,
        "run": str(run),
        "results": record["evaluation"][moment],
    }
