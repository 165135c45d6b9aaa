"""``finetune validate``."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from finetune.cli.options import AsJson
from finetune.cli.output import print_json, problem_as_dict
from finetune.cli.recipe_arguments import RecipeArguments, load_from_arguments
from finetune.core.errors import FinetuneError

EXAMPLES = """
finetune validate my.yaml train.learning_rate=2e-4
finetune validate quickstart --explain train.learning_rate
"""


def validate(
    context: typer.Context,
    recipe: RecipeArguments = None,
    explain: Annotated[str | None, typer.Option("--explain", metavar="KEY", help="Say what a key is set to.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of recipes, for editors.")] = False,
    resolved: Annotated[bool, typer.Option("--resolved", help="Print the recipe with all defaults.")] = False,
    as_json: AsJson = False,
) -> int:
    """Checks a recipe without loading anything."""
    if schema:
        from finetune.config.json_schema import recipe_schema

        print_json(recipe_schema())
        return 0
    if as_json and explain is None:
        return _as_json(context, recipe)
    loaded = load_from_arguments(context, recipe)
    if explain is not None:
        from finetune.config.explain import explain as explanation

        found = explanation(loaded, explain)
        print_json(found) if as_json else print(found)
    elif resolved:
        print(loaded.resolved_yaml(), end="")
    else:
        print(f"valid    {loaded.summary()}")
    return 0


def _as_json(context: typer.Context, recipe: list[str] | None) -> int:
    problems: list[dict[str, str]] = []
    notes: tuple[str, ...] = ()
    code = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            notes = load_from_arguments(context, recipe).warnings
        except FinetuneError as error:
            problems = [problem_as_dict(problem) for problem in error.problems]
            code = error.exit_code
    print_json({"valid": not problems, "problems": problems, "warnings": list(notes)})
    return code
