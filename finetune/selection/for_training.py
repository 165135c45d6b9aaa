"""A training recipe with ``data.selection``: first the rows are chosen, then training reads the subset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data_selection.engine.processes import Processes
from finetune.selection.folder import SelectionFolder
from finetune.selection.result import subset_names
from finetune.selection.run import INTERRUPTED, select

if TYPE_CHECKING:
    from rich.console import Console

    from finetune.config.load import LoadedRecipe
    from finetune.config.schema import Source

__all__ = ["select_for_training"]


def select_for_training(
    loaded: LoadedRecipe, *, dry_run: bool, overwrite: bool, console: Console | None
) -> LoadedRecipe | None:
    """Returns the recipe that trains on the rows that its ``select`` section keeps; None if that was interrupted.

    The selection lies beside the run, in ``OUTPUT_DIR-selection``; one that is there is gone on with, so a run that is
    resumed reads the same subset. A dry run plans the selection, and trains on all rows as far as it goes.

    Raises:
        FinetuneError: What is wrong with the selection.
    """
    recipe = loaded.recipe
    folder = SelectionFolder(Path(f"{recipe.output_dir}-selection"))
    selecting = replace(loaded, recipe=recipe.model_copy(update={"output_dir": str(folder.path)}))
    result = select(selecting, dry_run=dry_run, resume=not overwrite, overwrite=overwrite, console=console)
    if dry_run:
        return loaded
    if result.exit_code == INTERRUPTED:
        return None
    Processes.of_environment().wait()  # until the first has written the subset
    sources = recipe.data.train
    subsets = [
        source.model_copy(update=_moved(source, folder.selected / name))
        for source, name in zip(sources, subset_names(sources), strict=True)
        if (folder.selected / name).exists()
    ]
    data = recipe.data.model_copy(update={"train": subsets, "selection": False})
    return replace(loaded, recipe=recipe.model_copy(update={"data": data}))


def _moved(source: Source, path: Path) -> dict[str, str | None]:
    """Returns what of a source changes with its place; its rows' task does not."""
    return {"path": str(path), "split": None, "subset": None, "task": source.task or Path(source.path).stem}
