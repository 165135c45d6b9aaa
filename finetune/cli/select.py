"""``finetune select``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune.cli.options import AsJson, Overwrite
from finetune.cli.output import print_json, print_table
from finetune.cli.recipe_arguments import RecipeArguments, load_from_arguments
from finetune.cli.settings import Settings

if TYPE_CHECKING:
    from finetune.config.load import LoadedRecipe

EXAMPLES = """
finetune select my.yaml select.scorer=ifd select.fraction=0.2
finetune select my.yaml select.fraction=0.1 --resume
finetune select my.yaml --compare output_dir=comparisons/mine
"""


def select(
    context: typer.Context,
    recipe: RecipeArguments = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, write nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the selection in output_dir; no row is scored twice.")
    ] = False,
    overwrite: Overwrite = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Train on what select.scorer and select.compare keep, and on all rows.")
    ] = False,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes; what follows -- goes to torchrun.")] = 1,
    as_json: AsJson = False,
) -> int:
    """Scores the rows of a data set and writes those worth training on, in the form that they came in."""
    settings: Settings = context.obj
    loaded = load_from_arguments(context, recipe)
    from finetune.cli.launch import launch

    if nproc > 1:
        return launch(nproc, settings)

    if compare:
        return _compare(loaded, settings, resume=resume, overwrite=overwrite, as_json=as_json)

    from finetune.selection.run import select as run

    result = run(loaded, dry_run=dry_run, resume=resume, overwrite=overwrite, console=settings.console())
    if as_json and settings.rank == 0:
        print_json({"status": result.status, "folder": str(result.folder), **result.manifest})
    return result.exit_code


def _compare(loaded: LoadedRecipe, settings: Settings, *, resume: bool, overwrite: bool, as_json: bool) -> int:
    from finetune.selection.compare import compare

    found = compare(loaded, resume=resume, overwrite=overwrite, console=settings.console())
    if as_json:
        print_json({"ended": found.ended, "entries": found.rows})
        return found.exit_code
    metrics = list(dict.fromkeys((one["task"], one["metric"]) for row in found.rows for one in row["results"]))
    headers = ["trained on", "rows", "tokens", "steps", *(f"{task} {metric}" for task, metric in metrics)]
    print_table([_cells(row, metrics) for row in found.rows], headers)
    print(f"compared {found.ended}, in {found.folder}")
    if found.ended != "complete":
        print(f"go on    finetune select {found.folder / 'compare.yaml'} --compare --resume")
    return found.exit_code


def _cells(row: dict[str, Any], metrics: list[tuple[str, str]]) -> list[str]:
    from finetune.report.figures import metric_in_words

    by_metric = {(one["task"], one["metric"]): one for one in row["results"]}
    values = [
        f"{metric_in_words(one['metric'], one['value'])} ({metric_in_words(one['metric'], one['low'])} to "
        f"{metric_in_words(one['metric'], one['high'])})"
        for one in (by_metric[metric] for metric in metrics)
    ]
    return [row["name"], *(f"{row[key]:,}" if row[key] else "" for key in ("rows", "tokens", "steps")), *values]
