"""``finetune ls``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.options import AsJson
from finetune.cli.output import print_json, print_table
from finetune.core.errors import FinetuneError, list_choices, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel

EXAMPLES = """
finetune ls methods
finetune ls methods s2ft
"""

Row = dict[str, str]


def ls(
    kind: Annotated[str, typer.Argument(help="recipes, methods, engines, selectors, templates or tasks.")] = "recipes",
    name: Annotated[str | None, typer.Argument(help="A method or selector, whose keys are listed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Lists what there is."""
    if kind not in _KINDS:
        raise FinetuneError(f"there are no {kind!r} to list", want=list_choices(_KINDS), near=nearest(kind, _KINDS))
    if name is not None and kind not in _WITH_KEYS:
        raise FinetuneError(f"{kind} are not listed by name, as {' and '.join(_WITH_KEYS)} are", got=name)
    rows = _KINDS[kind]() if name is None else _keys(_WITH_KEYS[kind](name))
    if as_json:
        print_json(rows)
    elif rows:
        print_table([list(row.values()) for row in rows], list(rows[0]))


def _recipes() -> list[Row]:
    from finetune.config.shipped import list_recipes

    return [vars(recipe) for recipe in list_recipes()]


def _templates() -> list[Row]:
    from finetune.config.shipped import list_templates

    return [vars(template) for template in list_templates()]


def _tasks() -> list[Row]:
    from finetune.config.shipped import list_tasks

    return [vars(task) for task in list_tasks()]


def _methods() -> list[Row]:
    from finetune.methods import discover

    methods = [discover().get(name) for name in discover()]
    return [
        {
            "name": method.name,
            "family": method.family,
            "description": (method.__doc__ or "").strip().partition("\n")[0],
            "paper": method.paper,
        }
        for method in methods
    ]


def _engines() -> list[Row]:
    from finetune.engines.capabilities import STRATEGIES, unsupported
    from finetune.methods import discover

    return [
        {"method": name} | {strategy: _verdict(unsupported(discover().get(name), strategy)) for strategy in STRATEGIES}
        for name in discover()
    ]


def _verdict(reason: str) -> str:
    return f"no: {reason}" if reason else "yes"


def _selectors() -> list[Row]:
    from finetune.data_selection import discover

    scorers = [discover().get(name) for name in discover()]
    return [
        {
            "name": scorer.name,
            "keeps": scorer.direction,
            "description": (scorer.__doc__ or "").strip().partition("\n")[0],
            "paper": scorer.paper,
        }
        for scorer in scorers
    ]


def _method_config(name: str) -> type[BaseModel]:
    from finetune.methods import discover

    return discover().get(name).Config


def _scorer_config(name: str) -> type[BaseModel]:
    from finetune.data_selection import discover

    return discover().get(name).Config


def _keys(config: type[BaseModel]) -> list[Row]:
    from finetune.config.catalogue import describe_fields
    from finetune.core.source_fields import REQUIRED

    return [
        {
            "key": key.name,
            "default": "required" if key.default is REQUIRED else str(key.default),
            "type": key.type,
            "meaning": key.help,
        }
        for key in describe_fields(config, "")
    ]


_KINDS: dict[str, Callable[[], list[Row]]] = {
    "recipes": _recipes,
    "methods": _methods,
    "engines": _engines,
    "selectors": _selectors,
    "templates": _templates,
    "tasks": _tasks,
}
_WITH_KEYS: dict[str, Callable[[str], type[BaseModel]]] = {"methods": _method_config, "selectors": _scorer_config}
"""Kinds whose entries have keys of their own."""
