"""Fills in ``${env:NAME}`` and ``${output_dir}``; nothing else is evaluated."""

from __future__ import annotations

import os
import re
from typing import Any

from finetune.config.given import Given
from finetune.config.yaml12 import resolve_scalar
from finetune.core.errors import Problem, nearest

__all__ = ["interpolate"]

_REFERENCE = re.compile(r"\$\{([^}]*)\}")
_ENVIRONMENT = "env:"


def interpolate(given: Given) -> tuple[dict[str, str], list[Problem]]:
    """Replaces the references in ``given.data``.

    Returns:
        The texts that held a reference to the environment, by dotted key, as they stood: what is written to disk keeps
        them, so that a secret stays where it is. And the references that mean nothing.
    """
    filler = _Filler(given)
    if isinstance(given.data.get("output_dir"), str):
        given.data["output_dir"] = filler.fill(given.data["output_dir"], "output_dir")
    given.data = filler.fill(given.data, "")
    return filler.kept, filler.problems


class _Filler:
    def __init__(self, given: Given) -> None:
        self.given = given
        self.kept: dict[str, str] = {}
        self.problems: list[Problem] = []

    def fill(self, value: Any, key: str) -> Any:
        prefix = f"{key}." if key else ""
        if isinstance(value, dict):
            return {name: self.fill(entry, f"{prefix}{name}") for name, entry in value.items()}
        if isinstance(value, list):
            return [self.fill(entry, f"{prefix}{i}") for i, entry in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        filled = _REFERENCE.sub(lambda found: self._content(found[1], key), value)
        if f"${{{_ENVIRONMENT}" in value:
            self.kept[key] = value
        # A variable that is a whole value is read as if it stood in the file: LEARNING_RATE=2e-4 is a number.
        return resolve_scalar(filled) if _REFERENCE.fullmatch(value) else filled

    def _content(self, name: str, key: str) -> str:
        if name.startswith(_ENVIRONMENT):
            variable = name.removeprefix(_ENVIRONMENT)
            if variable not in os.environ:
                near = nearest(variable, os.environ)
                self.problems.append(
                    Problem(f"environment variable {variable} is not set", self.given.where(key), near=near)
                )
            return os.environ.get(variable, "")
        if name == "output_dir" and key != "output_dir":
            return str(self.given.data.get("output_dir", ""))
        self.problems.append(
            Problem(
                f"${{{name}}} means nothing", self.given.where(key), want="${env:NAME}, or ${output_dir} in other keys"
            )
        )
        return ""
