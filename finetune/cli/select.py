"""``finetune select``."""

from __future__ import annotations

from typing import Annotated

import typer

from finetune.cli.options import AsJson, Overwrite
from finetune.cli.output import print_json
from finetune.cli.recipe_arguments import RecipeArguments, load_from_arguments
from finetune.cli.settings import Settings

EXAMPLES = """
finetune select my.yaml select.scorer=ifd select.fraction=0.2
finetune select my.yaml select.fraction=0.1 --resume
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
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes; what follows -- goes to torchrun.")] = 1,
    as_json: AsJson = False,
) -> int:
    """Scores the rows of a data set and writes those worth training on, in the form that they came in."""
    settings: Settings = context.obj
    loaded = load_from_arguments(context, recipe)
    from finetune.cli.launch import launch, leave_processes

    if nproc > 1:
        return launch(nproc, settings)

    from finetune.selection.run import select as run

    result = run(loaded, dry_run=dry_run, resume=resume, overwrite=overwrite, console=settings.console())
    if as_json and settings.rank == 0:
        print_json({"status": result.status, "folder": str(result.folder), **result.manifest})
    leave_processes()
    return result.exit_code
