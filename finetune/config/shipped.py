"""Recipes by path or by the name they are shipped under."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from finetune.core.errors import ConfigError, list_choices, nearest
from finetune.core.shipped import shipped_names, shipped_path, shipped_yaml

__all__ = ["Shipped", "find_recipe", "list_recipes", "list_tasks", "list_templates"]

RESOLVED = "config.resolved.yaml"


@dataclass(frozen=True)
class Shipped:
    """One thing that comes with the package.

    Attributes:
        name: What it is called.
        description: One line.
    """

    name: str
    description: str


def list_recipes() -> list[Shipped]:
    """Returns the shipped recipes, each with its first comment line."""
    return [Shipped(name, _first_comment(find_recipe(name, shipped_only=True)[1])) for name in shipped_names("recipe")]


def list_tasks() -> list[Shipped]:
    """Returns the shipped evaluation tasks, each with its first comment line."""
    files = shipped_yaml("task")
    return [Shipped(name, _first_comment(_read(shipped_path(files[name]), name))) for name in shipped_names("task")]


def list_templates() -> list[Shipped]:
    """Returns the shipped chat templates, each with its first comment."""
    folder = resources.files("finetune").joinpath("data", "templates")
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else []
    found = [(entry.name.removesuffix(".jinja"), entry.read_text(encoding="utf-8")) for entry in entries]
    return [Shipped("tokenizer", "the model's own"), *(Shipped(name, _first_comment(text)) for name, text in found)]


def find_recipe(name: str, *, shipped_only: bool = False) -> tuple[str, str]:
    """Returns what a recipe is called in messages, and its text.

    Args:
        name: A path; a run directory, which means the recipe that it ran; or the name of a shipped recipe.
        shipped_only: Whether ``name`` is not looked for in the working directory.

    Raises:
        ConfigError: There is none, or it is not UTF-8 text.
    """
    path = Path(name)
    if not shipped_only:
        if (path / RESOLVED).is_file():
            path = path / RESOLVED
        if path.is_file():
            return str(path), _read(path, str(path))
    known = shipped_names("recipe")
    plain = name.removesuffix(".yaml")
    if plain in known:
        return f"shipped:{plain}.yaml", _read(shipped_path(f"{plain}.yaml"), plain)
    looks_like_path = path.suffix in (".yaml", ".yml")
    raise ConfigError(
        f"there is no recipe {name!r}",
        want="a path, or " + list_choices(known, more="`finetune ls recipes`"),
        near=_nearest_file(path) if looks_like_path and path.parent.is_dir() else nearest(plain, known),
    )


def _nearest_file(path: Path) -> str:
    near = nearest(path.name, [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")])
    return str(path.parent / near) if near else nearest(str(path.with_suffix("")), shipped_names("recipe"))


def _read(path: Path, label: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            "the file is not UTF-8 text", where=label, got=f"byte {error.object[error.start]:#x} at {error.start}"
        ) from error


def _first_comment(text: str) -> str:
    found = re.match(r"\s*(?:#|\{#-?)\s*(.*?)\s*(?:-?#\}|\n|$)", text)
    return found[1] if found else ""
