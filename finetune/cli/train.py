"""``finetune train``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.options import Overwrite
from finetune.cli.recipe_arguments import RecipeArguments, load_from_arguments
from finetune.cli.settings import Settings

EXAMPLES = """
finetune train quickstart method.name=lora train.learning_rate=2e-4
finetune train my.yaml --resume
"""

_LAST = "last"


def train(
    context: typer.Context,
    recipe: RecipeArguments = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, write nothing.")
    ] = False,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="[last|PATH]", help="Go on from the last, or that, checkpoint.")
    ] = None,
    overwrite: Overwrite = False,
    force: Annotated[bool, typer.Option("--force", help="Start although the memory estimate says no.")] = False,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes; what follows -- goes to torchrun.")] = 1,
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", min=0, help="How often processes that died go on from the last checkpoint."),
    ] = 0,
) -> int:
    """Fine-tunes a model as a recipe says."""
    settings: Settings = context.obj
    loaded = load_from_arguments(context, recipe)
    from finetune.cli.launch import launch, leave_processes

    if nproc > 1 or max_restarts:
        return launch(nproc, settings, max_restarts=max_restarts)

    from finetune.training.run import train as run

    _name_idle_devices(settings)
    result = run(loaded, dry_run=dry_run, resume=resume, overwrite=overwrite, force=force, console=settings.console())
    code = result.exit_code
    del result
    leave_processes()
    return code


def with_resume_value(arguments: Sequence[str]) -> list[str]:
    """Writes ``--resume`` without a value as ``--resume=last``; a value is ``last`` or the path of a checkpoint."""
    written = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument == "--resume":
            given = bool(remaining) and _is_checkpoint(remaining[0])
            argument = f"--resume={remaining.pop(0) if given else _LAST}"
        written.append(argument)
    return written


def _is_checkpoint(text: str) -> bool:
    return text == _LAST or Path(text).name.startswith("checkpoint") or (Path(text) / "trainer_state.json").is_file()


def _name_idle_devices(settings: Settings) -> None:
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    if count > 1 and "WORLD_SIZE" not in os.environ and not settings.quiet:
        print(f"{count} GPUs visible, using 1; add --nproc {count} to use all", file=sys.stderr)
