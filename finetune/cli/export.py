"""``finetune export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.options import Run, TrainedTask

EXAMPLES = """
finetune export runs/quickstart adapter --to peft
finetune export runs/quickstart weights --to safetensors
"""


def export(
    run: Run,
    out: Annotated[Path, typer.Argument(help="Folder to write to.")],
    to: Annotated[
        str, typer.Option("--to", help="merged, peft, safetensors, or zo-log: a zeroth-order run in kilobytes.")
    ] = "peft",
    task: TrainedTask = None,
) -> None:
    """Writes what was learned in a form that other tools load."""
    from finetune.export.run import export_run

    print(export_run(run, out, to, task=task))
