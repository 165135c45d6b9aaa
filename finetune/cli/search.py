"""``finetune search``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.options import AsJson, Overwrite
from finetune.cli.output import print_json, print_table
from finetune.cli.recipe_arguments import RecipeArguments, load_from_arguments
from finetune.cli.settings import Settings

if TYPE_CHECKING:
    from finetune.search.run import SearchResult

EXAMPLES = """
finetune search cofitune/search output_dir=searches/mine
finetune search cofitune/search search.max_runs=5 --resume
"""


def search(
    context: typer.Context,
    recipe: RecipeArguments = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the search in output_dir.")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> int:
    """Finds the layers and modules that cofitune best trains, by a training run for each candidate."""
    settings: Settings = context.obj
    loaded = load_from_arguments(context, recipe)

    from finetune.search.run import search as run

    found = run(loaded, resume=resume, overwrite=overwrite, console=settings.console())
    if as_json:
        print_json(_as_data(found))
    else:
        _print(found, loaded.given)
    return found.exit_code


def _print(found: SearchResult, given: str) -> None:
    headers = ["layers", "modules", "speciality", "versatility", "sum", ""]
    base = found.base
    rows = [["none", "untouched model", f"{base.speciality:.1f}", f"{base.versatility:.1f}", "", ""]]
    for one in found.tried:
        mark = "best" if one is found.best else ""
        numbers = (one.scores.speciality, one.scores.versatility, one.utility)
        rows.append([one.node.layers, ", ".join(one.node.modules), *(f"{number:.1f}" for number in numbers), mark])
    print_table(rows, headers)
    print(f"search   {found.ended}, {len(found.tried)} runs in {found.folder}")
    if found.ended != "complete":
        limits = " search.max_runs=null search.max_steps=null" if found.ended == "budget spent" else ""
        print(f"go on    finetune search {found.folder / 'search.yaml'} --resume{limits}")
    if found.best is not None:
        node = found.best.node
        print(f"best     {found.run_of(node)}, with its weights in final")
        chosen = f"method.layers={node.layers} 'method.modules=[{','.join(node.modules)}]'"
        print(f"next     finetune train {given} {chosen} output_dir={found.folder}-best")


def _as_data(found: SearchResult) -> dict[str, object]:
    return {
        "ended": found.ended,
        "base": vars(found.base),
        "tried": [
            {"layers": one.node.layers, "modules": one.node.modules, **vars(one.scores), "utility": one.utility}
            for one in found.tried
        ],
        "best": None if found.best is None else str(found.run_of(found.best.node)),
    }
