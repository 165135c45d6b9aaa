"""The ``method`` section: each method's own config, found through the registry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from finetune.config.check import Checked, check
from finetune.config.given import Given
from finetune.core.errors import Problem, RegistryError
from finetune.core.registry import canonical_name

__all__ = ["MethodSection", "check_methods", "file_fields", "method_configs"]


class MethodSection:
    """The methods of a recipe, in order.

    Attributes:
        names: Registry names.
        configs: Their configs.
    """

    def __init__(self, names: list[str], configs: list[BaseModel], *, is_list: bool) -> None:
        self.names = names
        self.configs = configs
        self._is_list = is_list

    def as_given(self) -> Any:
        """Returns the section with the keys that were given, each of its right type."""
        return self._section([config.model_dump(mode="json", exclude_unset=True) for config in self.configs])

    def complete(self) -> Any:
        """Returns the section with all keys, but for those that were left at null.

        A tuner of PEFT computes defaults that null stands for here, and takes no null itself.
        """
        return self._section(
            [
                config.model_dump(mode="json", exclude_none=True) | config.model_dump(mode="json", exclude_unset=True)
                for config in self.configs
            ]
        )

    def _section(self, entries: list[dict[str, Any]]) -> Any:
        named = [{"name": name, **entry} for name, entry in zip(self.names, entries, strict=True)]
        return named if self._is_list else named[0]


def check_methods(given: Given, known: list[str]) -> tuple[MethodSection | None, list[Problem], list[str]]:
    """Returns the method section of ``given``, or what is wrong with it, and warnings."""
    from finetune.methods import discover

    names: list[str] = []
    checked: list[Checked[Any]] = []
    problems: list[Problem] = []
    entries = list(_entries(given.data.get("method")))
    for prefix, entry in entries:
        own = dict(entry) if isinstance(entry, dict) else {"name": entry}
        name = own.pop("name", None)
        if not isinstance(name, str) and isinstance(entry, dict):
            problems.append(Problem("the method has no name", given.where(prefix[:-1]), want="`finetune ls methods`"))
        if not isinstance(name, str):
            continue
        try:
            config = discover().get(name, where=given.where(f"{prefix}name")).Config
        except RegistryError as error:
            problems += error.problems
            continue
        names.append(canonical_name(name))
        checked.append(check(config, own, given, prefix=prefix, known=known))
    problems += [problem for one in checked for problem in one.problems]
    if not entries:
        problems.append(Problem("the list of methods is empty", given.where("method"), want="`finetune ls methods`"))
    warnings = [warning for one in checked for warning in one.warnings]
    configs = [one.value for one in checked if one.value is not None]
    if problems:
        return None, problems, warnings
    return MethodSection(names, configs, is_list=isinstance(given.data.get("method"), list)), [], warnings


def file_fields(config: BaseModel) -> list[str]:
    """Returns the fields of a method's config that name files."""
    from finetune.methods.base import FILE

    return [name for name, field in type(config).model_fields.items() if field.json_schema_extra == FILE]


def method_configs(section: Any) -> list[type[BaseModel]]:
    """Returns the configs of those methods that ``section`` names and that exist."""
    from finetune.methods import discover

    names = [entry.get("name") if isinstance(entry, dict) else entry for _, entry in _entries(section)]
    return [discover().get(name).Config for name in names if isinstance(name, str) and name in discover()]


def _entries(section: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(section, list):
        yield from ((f"method.{number}.", entry) for number, entry in enumerate(section))
    else:
        yield "method.", section if section is not None else {"name": "lora"}
