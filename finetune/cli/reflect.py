"""``finetune reflect``."""

from __future__ import annotations

from typing import Annotated

import typer

from finetune.cli.options import AsJson, Overwrite
from finetune.cli.output import print_json
from finetune.cli.recipe_arguments import RecipeArguments, load_from_arguments
from finetune.cli.settings import Settings

EXAMPLES = """
finetune reflect my.yaml reflect.endpoint=http://localhost:8000/v1 reflect.model=my-70b
finetune reflect my.yaml reflect.keep=all --resume
"""


def reflect(
    context: typer.Context,
    recipe: RecipeArguments = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, ask nobody, write nothing.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the reflection in output_dir; nothing is asked twice.")
    ] = False,
    overwrite: Overwrite = False,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes; what follows -- goes to torchrun.")] = 1,
    as_json: AsJson = False,
) -> int:
    """Has a teacher rewrite instructions and answers, and keeps the version that the model itself prefers."""
    settings: Settings = context.obj
    loaded = load_from_arguments(context, recipe)
    from finetune.cli.launch import launch

    if nproc > 1:
        return launch(nproc, settings)

    from finetune.selection.reflect import reflect as run

    result = run(loaded, dry_run=dry_run, resume=resume, overwrite=overwrite, console=settings.console())
    if as_json and settings.rank == 0:
        print_json({"status": result.status, "folder": str(result.folder), **result.manifest})
    return result.exit_code
