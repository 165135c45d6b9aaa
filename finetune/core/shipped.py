"""Files that come with the package: recipes, tasks and their data, found through ``importlib.resources``."""

from __future__ import annotations

import atexit
import functools
from contextlib import ExitStack
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

from finetune.core.errors import ConfigError, list_choices, nearest

__all__ = ["SHIPPED", "resolve_data_path", "shipped_names", "shipped_path", "shipped_yaml"]

SHIPPED = "shipped:"
"""A path in a recipe or a task that begins so is relative to the package's recipes, wherever they are installed."""

_PACKAGE = "finetune.recipes"
# Files of a package that is imported from a zip archive are unpacked for as long as the process runs.
_unpacked = ExitStack()
atexit.register(_unpacked.close)


def resolve_data_path(path: str, folder: Path | None = None) -> str:
    """Returns ``path`` as the data reader takes it.

    Args:
        path: ``shipped:NAME``, a path, or a hub name.
        folder: What the path of a file is relative to; None is the working directory.

    Raises:
        ConfigError: The package ships no such file.
    """
    if path.startswith(SHIPPED):
        return str(shipped_path(path))
    # A hub name has no suffix and no folder of that name.
    if folder is not None and (Path(path).suffix or (folder / path).exists()):
        return str(folder / path)
    return path


def shipped_path(name: str) -> Path:
    """Returns the file of the package's recipes that ``name`` means, for example ``quickstart/train.jsonl``.

    Args:
        name: A path below the recipes, with or without ``shipped:`` before it.

    Raises:
        ConfigError: There is no such file; the error names the nearest one.
    """
    relative = name.removeprefix(SHIPPED)
    parts = [part for part in relative.split("/") if part not in ("", ".")]
    if ".." not in parts and (file := resources.files(_PACKAGE).joinpath(*parts)).is_file():
        return file if isinstance(file, Path) else _unpack("/".join(parts))
    names = [known for known in _files() if not known.endswith((".py", ".pyc"))]
    raise ConfigError(
        f"the package ships no file {relative!r}",
        want=list_choices(f"{SHIPPED}{known}" for known in names),
        near=nearest(relative, names),
    )


def shipped_names(kind: Literal["recipe", "task"]) -> list[str]:
    """Returns the names of the recipes or tasks that are shipped.

    A recipe is called by its path without ``.yaml`` (``lora/quickstart``), a task by its file name (``cron``). A task
    is told apart by its top-level key ``kind``.
    """
    return sorted(shipped_yaml(kind))


@functools.cache
def shipped_yaml(kind: Literal["recipe", "task"]) -> dict[str, str]:
    """Returns name -> path below the recipes of the shipped YAML files of one kind."""
    found = {}
    for path in _files():
        if path.endswith(".yaml"):
            text = resources.files(_PACKAGE).joinpath(*path.split("/")).read_text(encoding="utf-8")
            is_task = any(line.startswith("kind:") for line in text.splitlines())
            name = path.removesuffix(".yaml")
            if is_task == (kind == "task"):
                found[name.rsplit("/", 1)[-1] if is_task else name] = path
    return found


@functools.cache
def _files() -> tuple[str, ...]:
    return tuple(sorted(_walk(resources.files(_PACKAGE), "")))


def _walk(folder: Traversable, prefix: str) -> list[str]:
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += [] if entry.name == "__pycache__" else _walk(entry, f"{prefix}{entry.name}/")
        else:
            found.append(prefix + entry.name)
    return found


@functools.cache
def _unpack(relative: str) -> Path:
    return _unpacked.enter_context(resources.as_file(resources.files(_PACKAGE).joinpath(*relative.split("/"))))
