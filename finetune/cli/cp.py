"""``finetune cp``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.options import Overwrite, RecipeName
from finetune.core.errors import RefusedError

EXAMPLES = """
finetune cp alpaca my.yaml
finetune cp lora/quickstart recipes/
"""


def cp(
    name: RecipeName,
    destination: Annotated[Path, typer.Argument(help="File or folder to write to.")],
    overwrite: Overwrite = False,
) -> None:
    """Copies a shipped recipe."""
    from finetune.config.shipped import find_recipe
    from finetune.core.files import write_text

    _, text = find_recipe(name)
    if destination.is_dir():
        destination = destination / f"{Path(name).with_suffix('').name}.yaml"
    if destination.exists() and not overwrite:
        raise RefusedError("the file exists", where=str(destination), fix="--overwrite, or another name")
    write_text(destination, text)
    print(destination)
