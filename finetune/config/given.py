"""What recipes and overrides say together, and where each key comes from."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from finetune.config.overrides import Override
from finetune.config.schema import name_methods, name_scorer
from finetune.config.yaml12 import Document, flow_yaml
from finetune.core.errors import FinetuneError, Problem, list_choices, nearest
from finetune.core.registry import canonical_name

__all__ = ["Given"]


class Given:
    """Layers laid over each other: later ones win, mappings merge deeply, lists replace.

    Attributes:
        data: The merged content.
        origins: Dotted key -> ``file:line`` or ``argument N``.
        files: What the files are called, in order.
        problems: Overrides that fit nothing.
        warnings: What was left out, and with what consequence.
    """

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.files: list[str] = []
        self.problems: list[Problem] = []
        self.warnings: list[str] = []

    def merge(self, document: Document, label: str) -> None:
        """Lays the content of the recipe file ``label`` over what there is."""
        self.files.append(label)
        layer = {key: value for key, value in document.data.items() if value is not None}
        if "method" in layer:
            layer["method"] = name_methods(layer["method"])
        if isinstance(layer.get("select"), dict) and "scorer" in layer["select"]:
            layer["select"] = {**layer["select"], "scorer": name_scorer(layer["select"]["scorer"])}
        if isinstance(layer.get("method"), dict) and "name" in layer["method"]:
            self._switch_method(layer["method"]["name"])
        self._merge_into(self.data, layer, "")
        self.origins.update({key: f"{file}:{line}" for key, (file, line) in document.positions.items()})

    def apply(self, overrides: Sequence[Override]) -> None:
        """Applies overrides in order; those that fit nothing become problems."""
        overrides = [self._without_shorthand(override) for override in overrides]
        for name in [override.value for override in overrides if override.key == "method.name"]:
            self._switch_method(name)
        for override in overrides:
            self._apply(override)

    def origin(self, key: str) -> str:
        """Returns where ``key``, or else the nearest thing around it, was given; ``default`` if nowhere."""
        while key:
            if key in self.origins:
                return self.origins[key]
            key = key.rpartition(".")[0]
        return "default"

    def where(self, key: str) -> str:
        """Returns ``origin  key`` for a message; for what was given nowhere, the files that might have."""
        origin = self.origin(key)
        return f"{', '.join(self.files) if origin == 'default' else origin}  {key}".strip()

    def _merge_into(self, target: dict[str, Any], layer: dict[str, Any], prefix: str) -> None:
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                self._merge_into(target[key], value, f"{prefix}{key}.")
            else:
                self._forget(f"{prefix}{key}")
                target[key] = copy.deepcopy(value)

    def _switch_method(self, name: Any) -> None:
        """Drops the keys of another method that ``name`` does not know: they were meant for that one."""
        from finetune.methods import discover

        current = self.data.get("method")
        if not isinstance(current, dict) or not isinstance(name, str) or name not in discover():
            return
        if canonical_name(str(current.get("name"))) == canonical_name(name):
            return
        known = discover().get(name).Config.model_fields
        dropped = [key for key in current if key != "name" and key not in known]
        if dropped:
            self.warnings.append(
                f"the recipe is written for {current.get('name')} and {canonical_name(name)} has no "
                f"{list_choices(f'method.{key}' for key in dropped)}, so what it says there has no effect"
            )
        for key in dropped:
            del current[key]
            self._forget(f"method.{key}")

    def _without_shorthand(self, override: Override) -> Override:
        """Reads ``method=lora`` as ``method.name=lora``, and bare names in a list of methods as mappings."""
        if override.key == "select.scorer":
            return replace(override, value=name_scorer(override.value))
        if override.key != "method" or override.action == "delete":
            return override
        if override.action == "append" or not isinstance(override.value, str):
            return replace(override, value=name_methods(override.value))
        if not isinstance(self.data.get("method"), dict):
            self.data["method"] = {}
            self._forget("method")
        return replace(override, key="method.name")

    def _apply(self, override: Override) -> None:
        *parents, last = override.key.split(".")
        try:
            container = self._container(parents, override)
            if override.action == "delete":
                del container[_index(container, last, override)]
            elif override.action == "append":
                container[last] = [*_as_list(container.get(last), override), override.value]
            elif isinstance(container, list):
                container[_index(container, last, override)] = override.value
            else:
                container[last] = override.value
        except FinetuneError as error:
            self.problems += error.problems
            return
        self._forget(override.key)
        if override.action != "delete":
            self.origins[override.key] = override.origin

    def _container(self, parents: Sequence[str], override: Override) -> Any:
        container: Any = self.data
        for depth, segment in enumerate(parents, 1):
            key = ".".join(parents[:depth])
            if isinstance(container, dict) and segment not in container and override.action != "delete":
                container[segment] = {}
                self.origins[key] = override.origin
            child = container[_index(container, segment, override)]
            if not isinstance(child, dict | list):
                raise FinetuneError(
                    f"{key} is not a mapping, so it has no key {override.key!r}",
                    where=f"{override.origin}  {override.text}",
                    got=f"{key}: {flow_yaml(child)}",
                    fix=f"{key}={{...}}",
                )
            container = child
        return container

    def _forget(self, key: str) -> None:
        for known in [known for known in self.origins if known == key or known.startswith(f"{key}.")]:
            del self.origins[known]


def _index(container: Any, segment: str, override: Override) -> Any:
    """Returns the key or position that ``segment`` means in ``container``."""
    if isinstance(container, list) and segment.isdigit() and int(segment) < len(container):
        return int(segment)
    if isinstance(container, dict) and segment in container:
        return segment
    choices = [str(key) for key in (container if isinstance(container, dict) else range(len(container)))]
    raise FinetuneError(
        f"there is no key {override.key!r}" + (" to delete" if override.action == "delete" else ""),
        where=f"{override.origin}  {override.text}",
        want=list_choices(choices),
        near=nearest(segment, choices),
    )


def _as_list(value: Any, override: Override) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, dict):
        raise FinetuneError(
            f"{override.key} is a mapping, so nothing can be appended",
            where=f"{override.origin}  {override.text}",
            fix=f"{override.key}.KEY=VALUE",
        )
    return list(value) if isinstance(value, list) else [value]
