"""``finetune estimate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from finetune.cli.options import AsJson
from finetune.cli.output import print_json, print_table
from finetune.cli.recipe_arguments import RecipeArguments, load_from_arguments

if TYPE_CHECKING:
    from finetune.planning.memory import MemoryEstimate

EXAMPLES = """
finetune estimate quickstart
finetune estimate my.yaml train.per_device_train_batch_size=16 --json
"""


def estimate(context: typer.Context, recipe: RecipeArguments = None, as_json: AsJson = False) -> None:
    """Says what memory a recipe needs, part by part, without reading the model's weights."""
    loaded = load_from_arguments(context, recipe)
    from finetune.training.estimate import estimate_recipe

    found = estimate_recipe(loaded.recipe)
    if as_json:
        print_json(found.as_dict())
        return
    _print_memory(found)


def _print_memory(found: MemoryEstimate) -> None:
    rows = [[part, _gigabytes(size), f"{size / found.peak:.0%}"] for part, size in found.parts.items()]
    print_table([*rows, ["peak", _gigabytes(found.peak), ""]], ["part", "GB", "share"])
    print()
    print_table([[moment, _gigabytes(size)] for moment, size in found.moments.items()], ["moment", "GB"])
    print()
    verdict = "fits" if found.fits else "does not fit"
    print(f"{verdict}: {_gigabytes(found.available)} GB may be taken; the peak is at the {found.phase}")
    print(f"less     {found.remedy}")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f}"
