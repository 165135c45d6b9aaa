"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["AsJson", "Base", "MaxNewTokens", "Overwrite", "RecipeName", "Run", "Target", "TrainedTask"]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Base = Annotated[str | None, typer.Option("--base", help="The base model, where the target does not know it.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
RecipeName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a shipped recipe.")]
Run = Annotated[Path, typer.Argument(help="Run directory, or its final folder.")]
TrainedTask = Annotated[
    str | None, typer.Option("--task", help="Which of its tasks, where the model tells them apart.")
]
Target = Annotated[str, typer.Argument(help="Run directory, model folder, hub id or bundled model.")]
