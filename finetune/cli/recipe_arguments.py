"""What the verbs that take a recipe have in common: recipes, then overrides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from finetune.core.errors import ConfigError

if TYPE_CHECKING:
    from finetune.config.load import LoadedRecipe

__all__ = ["RecipeArguments", "load_from_arguments"]

RecipeArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="RECIPE... [KEY=VALUE]...", help="Paths or names of recipes; then keys to set."),
]


def load_from_arguments(context: typer.Context, arguments: list[str] | None) -> LoadedRecipe:
    """Returns the recipe that a verb's arguments mean.

    Raises:
        ConfigError: There is none, or something is wrong with it.
    """
    from finetune.config.load import load_recipe
    from finetune.config.overrides import split_arguments

    flags = [option for parameter in context.command.params for option in parameter.opts if option.startswith("--")]
    configs, overrides = split_arguments([*(arguments or []), *context.args], flags=flags)
    if not configs:
        raise ConfigError(
            "no recipe is given",
            want="a path, or a name that `finetune ls` prints",
            fix=f"{context.command_path} quickstart",
        )
    return load_recipe(configs, overrides)
