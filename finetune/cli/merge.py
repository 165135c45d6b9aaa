"""``finetune merge``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.options import AsJson, Run, TrainedTask
from finetune.cli.output import print_json

EXAMPLES = """
finetune merge runs/quickstart merged
finetune merge runs/quickstart merged --dtype bfloat16
"""


def merge(
    run: Run,
    out: Annotated[Path, typer.Argument(help="Folder for the merged model.")],
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; else the base's.")] = None,
    task: TrainedTask = None,
    as_json: AsJson = False,
) -> None:
    """Writes base and learned state as one plain Hugging Face model."""
    from finetune.export.merge import merge_run

    report = merge_run(run, out, dtype, task=task)
    print_json(vars(report)) if as_json else print(report)
