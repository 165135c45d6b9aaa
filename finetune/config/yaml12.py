"""Reads YAML 1.2 with its core schema: ``2e-4`` is a number, ``yes`` is text, ``012`` is 12, a key stands once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from finetune.core.errors import ConfigError, Problem

__all__ = ["Document", "Scalar", "dump_yaml", "flow_yaml", "read_yaml", "resolve_scalar"]

Scalar = str | int | float | bool | None

_SCHEMA: tuple[tuple[re.Pattern[str], Callable[[str], Scalar]], ...] = (
    (re.compile(r"null|Null|NULL|~|"), lambda text: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]+"), lambda text: int(text, 10)),
    (re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text[2:], 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)"), lambda text: float(text.lower().replace(".", ""))),
    (re.compile(r"\.(nan|NaN|NAN)"), lambda text: float("nan")),
)


_CORE_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Document:
    """A YAML text as plain data.

    Attributes:
        data: Mappings, lists and scalars.
        positions: Dotted key (a list's items by number) -> file and line, counted from 1.
    """

    data: Any
    positions: dict[str, tuple[str, int]] = field(default_factory=dict)


def resolve_scalar(text: str) -> Scalar:
    """Returns what an unquoted scalar means in the YAML 1.2 core schema."""
    return next((convert(text) for pattern, convert in _SCHEMA if pattern.fullmatch(text)), text)


def read_yaml(text: str, label: str) -> Document:
    """Returns the one document of ``text``; an empty text gives None as its data.

    Args:
        text: YAML.
        label: What the text is called in messages: a path.

    Raises:
        ConfigError: The text is not YAML, or a mapping has a key twice; all such keys are reported.
    """
    try:
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        raise ConfigError.of([_syntax_problem(error, text, label)]) from error
    except YAMLError as error:
        raise ConfigError("this is not YAML", where=label, got=" ".join(str(error).split())) from error
    reader = _Reader(label)
    data = None if root is None else reader.plain(root, ())
    if reader.problems:
        raise ConfigError.of(reader.problems)
    return Document(data, reader.positions)


class _Reader:
    """Turns nodes into plain data and collects positions and problems on the way."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.positions: dict[str, tuple[str, int]] = {}
        self.problems: list[Problem] = []
        self._open: list[Node] = []

    def plain(self, node: Node, path: tuple[str, ...]) -> Any:
        if not str(node.tag).startswith(_CORE_TAG):
            self.problems.append(Problem(f"tag {node.tag} means nothing here", self._at(node), fix="remove it"))
            return None
        if isinstance(node, ScalarNode):
            return resolve_scalar(node.value) if node.style is None else node.value
        if any(node is outer for outer in self._open):
            self.problems.append(Problem("an alias refers to what it is a part of", self._at(node)))
            return None
        self._open.append(node)
        try:
            if isinstance(node, SequenceNode):
                return [self._entry(item, item, (*path, str(i))) for i, item in enumerate(node.value)]
            return self._mapping(node, path) if isinstance(node, MappingNode) else None
        finally:
            self._open.pop()

    def _mapping(self, node: MappingNode, path: tuple[str, ...]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self.problems.append(Problem("a key is not a word", self._at(key_node)))
                continue
            key = str(key_node.value)
            dotted = ".".join((*path, key))
            if key in data:
                self.problems.append(
                    Problem(
                        f"key {key!r} is given twice",
                        f"{self._at(key_node)}  {dotted}",
                        got=f"first in line {lines[key]}",
                        fix="remove one of the two",
                    )
                )
            lines[key] = key_node.start_mark.line + 1
            data[key] = self._entry(key_node, value_node, (*path, key))
        return data

    def _entry(self, mark_node: Node, value: Node, path: tuple[str, ...]) -> Any:
        self.positions[".".join(path)] = (self.label, mark_node.start_mark.line + 1)
        return self.plain(value, path)

    def _at(self, node: Node) -> str:
        return f"{self.label}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _syntax_problem(error: MarkedYAMLError, text: str, label: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    what = error.problem or error.context or "this is not YAML"
    if mark is None:
        return Problem(what, label)
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    where = f"{label}:{mark.line + 1}:{mark.column + 1}"
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return Problem("a line is indented with a tab", where, got=repr(line), fix="indent with spaces")
    return Problem(f"this is not YAML: {what}", where, got=line.strip())


def dump_yaml(data: Any) -> str:
    """Returns plain data as block style YAML 1.2 in the given order; :func:`read_yaml` gives it back unchanged."""
    return _dump(data, flow=False)


def flow_yaml(data: Any) -> str:
    """Returns plain data as YAML in one line, as it would be typed."""
    return _dump([data], flow=True).strip().removeprefix("[").removesuffix("]")


def _dump(data: Any, *, flow: bool) -> str:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = flow
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 10_000
    yaml.allow_unicode = True
    stream = StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()
