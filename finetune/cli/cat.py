"""``finetune cat``."""

from __future__ import annotations

from finetune.cli.options import RecipeName

EXAMPLES = """
finetune cat quickstart
finetune cat lora/quickstart > my.yaml
"""


def cat(name: RecipeName) -> None:
    """Prints a shipped recipe."""
    from finetune.config.shipped import find_recipe

    print(find_recipe(name)[1], end="")
