"""Reads the fields of a dataclass from a module's source, without importing the module.

``transformers.TrainingArguments`` and PEFT's configs are the schema of parts of a recipe, yet importing their
packages takes ten seconds. Their source says the same in some milliseconds, always for the installed version.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["REQUIRED", "SourceField", "package_folder", "read_enum_values", "read_fields"]


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()


@dataclass(frozen=True)
class SourceField:
    """One field as the source spells it.

    Attributes:
        name: The field's name.
        annotation: The annotation's source text.
        default: The default, :data:`REQUIRED` where there is none, or None where it is computed.
        help: The text of ``metadata={"help": ...}``, or an empty string.
    """

    name: str
    annotation: str
    default: Any
    help: str


def package_folder(package: str) -> Path | None:
    """Returns the folder of an installed top-level package without importing it, or None."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@functools.cache
def _classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


@functools.cache
def read_fields(path: Path, class_name: str) -> dict[str, SourceField]:
    """Returns the own dataclass fields of ``class_name`` in ``path``, in order; bases are the caller's to merge.

    Raises:
        KeyError: The module defines no such class.
    """
    fields = {}
    for node in _classes(path)[class_name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotation = ast.unparse(node.annotation).strip("\"'")
            if not annotation.startswith(("ClassVar", "typing.ClassVar")):
                default, text = _default_and_help(node.value)
                fields[node.target.id] = SourceField(node.target.id, annotation, default, text)
    return fields


@functools.cache
def read_enum_values(path: Path, class_name: str) -> tuple[str, ...]:
    """Returns the values of the enum ``class_name`` in ``path``, in order.

    Raises:
        KeyError: The module defines no such class.
    """
    members = [node.value for node in _classes(path)[class_name].body if isinstance(node, ast.Assign)]
    return tuple(str(_literal(value)) for value in members)


def _default_and_help(value: ast.expr | None) -> tuple[Any, str]:
    if value is None:
        return REQUIRED, ""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field")):
        return _literal(value), ""
    given = {keyword.arg: keyword.value for keyword in value.keywords}
    default = _literal(given["default"]) if "default" in given else None if "default_factory" in given else REQUIRED
    metadata = given.get("metadata")
    text = _literal_entry(metadata, "help") if isinstance(metadata, ast.Dict) else ""
    return default, " ".join(text.split())


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _literal_entry(node: ast.Dict, key: str) -> str:
    for name, value in zip(node.keys, node.values, strict=True):
        if isinstance(name, ast.Constant) and name.value == key:
            return str(_literal(value) or "")
    return ""
