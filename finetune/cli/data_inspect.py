"""``finetune data inspect``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from finetune.cli.options import AsJson
from finetune.cli.output import print_json, print_table
from finetune.cli.recipe_arguments import RecipeArguments, load_from_arguments

_ENOUGH_TO_JUDGE_DROPS = 32
"""Rows that are read at least: of three rows one that is dropped would be more than data.max_dropped allows."""

EXAMPLES = """
finetune data inspect quickstart
finetune data inspect my.yaml data.loss_on=last --count 1 --tokens
"""


def inspect(
    context: typer.Context,
    recipe: RecipeArguments = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Examples to show.")] = 3,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show each token, its id and whether it is learned.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Shows examples as the model sees them; what is in [brackets] is learned."""
    loaded = load_from_arguments(context, recipe)

    from finetune.data.inspect import inspect_rows
    from finetune.training.plan import make_plan

    plan = make_plan(loaded.recipe, meta=True, limit=max(count, _ENOUGH_TO_JUDGE_DROPS))
    rows = inspect_rows(plan.train, plan.tokenizer, count)
    if as_json:
        print_json(rows)
        return
    for number, row in enumerate(rows):
        print(f"--- example {number + 1}: {len(row['tokens'])} tokens", row["text"], sep="\n")
        if tokens:
            print_table([_cells(token) for token in row["tokens"]], ["id", "loss", "token"])


def _cells(token: dict[str, Any]) -> list[str]:
    return [str(token["id"]), "learned" if token["loss"] else "", repr(token["text"])]
