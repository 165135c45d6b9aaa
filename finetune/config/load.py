"""From recipe files and overrides to one checked recipe."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from finetune.config.catalogue import known_keys
from finetune.config.check import check
from finetune.config.given import Given
from finetune.config.interpolate import interpolate
from finetune.config.method_section import MethodSection, check_methods, file_fields, method_configs
from finetune.config.overrides import parse_overrides
from finetune.config.rules import broken_rules
from finetune.config.schema import Recipe
from finetune.config.scorer_section import ScorerSection, check_scorer, scorer_configs
from finetune.config.shipped import find_recipe
from finetune.config.train_section import train_section
from finetune.config.yaml12 import Document, dump_yaml, read_yaml
from finetune.core.errors import ConfigError, FinetuneError, FinetuneWarning, Problem

__all__ = ["LoadedRecipe", "load_recipe"]


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe and where it comes from.

    Attributes:
        recipe: The recipe; its ``method`` and ``train`` hold what was given, each value of its right type.
        given: The files and overrides as given, one after the other.
        warnings: What was left out or understood although it was written otherwise.
    """

    recipe: Recipe
    given: str
    warnings: tuple[str, ...]
    _layers: Given
    _methods: MethodSection
    _scorer: ScorerSection
    _kept: dict[str, str]

    def origin(self, key: str) -> str:
        """Returns where ``key`` was given: ``file:line``, ``argument N`` or ``default``."""
        return self._layers.origin(key) if self.is_given(key) else "default"

    def is_given(self, key: str) -> bool:
        """Returns whether a recipe or an override says something about ``key``, as a whole or in part."""
        found, _ = _look_up(self._layers.data, key)
        return found

    def value(self, key: str) -> Any:
        """Returns the value of ``key`` after all layers and defaults, or None."""
        return _look_up(self.resolved(), key)[1]

    def resolved(self) -> dict[str, Any]:
        """Returns every key as plain data; of ``train`` those that were given: the rest are transformers' defaults."""
        data = {**self.recipe.model_dump(mode="json"), "method": self._methods.complete()}
        data["select"]["scorer"] = self._scorer.complete()
        return data

    def summary(self) -> str:
        """Returns one line: what trains, on what, where it goes."""
        sources = ", ".join(source.path for source in self.recipe.data.train)
        methods = " + ".join(self._methods.names)
        return f"{methods} on {self.recipe.model.name_or_path}, data {sources}, output {self.recipe.output_dir}"

    def resolved_yaml(self) -> str:
        """Returns :meth:`resolved` as YAML that :func:`load_recipe` reads, from whatever working directory.

        What came from an environment variable stays a reference to it, so that no secret is written to disk.
        """
        data = _absolute_paths(self.resolved(), self._methods.configs, self._scorer.config)
        for key, text in self._kept.items():
            _put(data, key, text)
        return dump_yaml(data)


def load_recipe(configs: Sequence[str], overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Returns the recipe that ``configs`` and ``overrides`` come to.

    Args:
        configs: Paths, run directories, or names of shipped recipes; later ones win.
        overrides: See :mod:`finetune.config.overrides`; they win over all files.

    Raises:
        ConfigError: All that is wrong, with file and line.
    """
    layers, texts = _read_layers(configs, overrides)
    kept, unfilled = interpolate(layers)
    section = layers.data.get("select")
    scorer_given = section.get("scorer") if isinstance(section, dict) else None
    known = list(known_keys(method_configs(layers.data.get("method")), scorer_configs(scorer_given)))
    scorer = check_scorer(layers, scorer_given, known)
    methods, method_problems, method_warnings = check_methods(layers, known)
    checked = check(Recipe, layers.data, layers, known=known)
    train = check(train_section(), layers.data.get("train", {}), layers, prefix="train.", known=known)
    problems = [*checked.problems, *method_problems, *scorer.problems]
    # That it is no mapping at all was already said of the whole recipe.
    problems += train.problems if isinstance(layers.data.get("train", {}), dict) else []
    # Of what was not filled in, the type does not matter.
    places = {problem.where for problem in unfilled}
    problems = [*layers.problems, *unfilled, *(problem for problem in problems if problem.where not in places)]
    if problems or checked.value is None or methods is None or train.value is None or scorer.value is None:
        raise ConfigError.of(_in_order(problems))
    select = checked.value.select.model_copy(update={"scorer": scorer.value.as_given()})
    sections = {
        "method": methods.as_given(),
        "train": train.value.model_dump(exclude_unset=True),
        "select": select,
    }
    recipe = checked.value.model_copy(update=sections)
    if broken := broken_rules(recipe, layers):
        raise ConfigError.of(broken)
    notes = (*layers.warnings, *checked.warnings, *method_warnings, *scorer.warnings, *train.warnings)
    for note in notes:
        warnings.warn(note, FinetuneWarning, stacklevel=2)
    return LoadedRecipe(recipe, "\n".join(texts), notes, layers, methods, scorer.value, kept)


def _read_layers(configs: Sequence[str], overrides: Sequence[str]) -> tuple[Given, list[str]]:
    layers = Given()
    texts: list[str] = []
    problems: list[Problem] = []
    for config in configs:
        try:
            label, text = find_recipe(config)
            texts.append(f"# {label}\n{text.rstrip()}\n")
            layers.merge(_read_mapping(text, label), label)
        except FinetuneError as error:
            problems += error.problems
    try:
        parsed = parse_overrides(overrides)
        layers.apply(parsed)
        texts += ["# overrides\n" + "".join(f"# {override.text}\n" for override in parsed)] if parsed else []
    except FinetuneError as error:
        problems += error.problems
    if problems:
        raise ConfigError.of(problems)
    return layers, texts


def _read_mapping(text: str, label: str) -> Document:
    document = read_yaml(text, label)
    if document.data is None:
        raise ConfigError(
            "the recipe is empty",
            where=label,
            want=f"the sections {', '.join(Recipe.model_fields)}",
            fix=f"finetune cp quickstart {label}",
        )
    if not isinstance(document.data, dict):
        raise ConfigError(
            "a recipe is a mapping", where=label, got=type(document.data).__name__, want="key: value lines"
        )
    return document


def _in_order(problems: list[Problem]) -> list[Problem]:
    """Sorts by file and line or by argument, each problem once; what has no line comes first."""

    def position(problem: Problem) -> tuple[str, int]:
        place = problem.where.partition("  ")[0]
        number = re.search(r"\d*$", place)
        digits = number[0] if number else ""
        return place.removesuffix(digits), int(digits or 0)

    return sorted(dict.fromkeys(problems), key=position)


def _look_up(data: Any, key: str) -> tuple[bool, Any]:
    for segment in key.split("."):
        if isinstance(data, dict) and segment in data:
            data = data[segment]
        elif isinstance(data, list) and segment.isdigit() and int(segment) < len(data):
            data = data[int(segment)]
        else:
            return False, None
    return True, data


def _put(data: Any, key: str, value: Any) -> None:
    *parents, last = key.split(".")
    found, container = _look_up(data, ".".join(parents)) if parents else (True, data)
    if found and isinstance(container, dict):
        container[last] = value
    elif found and isinstance(container, list):
        container[int(last)] = value


def _absolute_paths(data: dict[str, Any], configs: Sequence[BaseModel], scorer: BaseModel) -> dict[str, Any]:
    """Makes the paths of files that exist, and of the run directory, independent of the working directory."""
    data["output_dir"] = str(Path(data["output_dir"]).absolute())
    data["model"]["name_or_path"] = _absolute(data["model"]["name_or_path"])
    data["data"]["chat_template"] = _absolute(data["data"]["chat_template"])
    for sources in (data["data"]["train"], data["data"]["eval"], data["data"]["calibration"]):
        for source in sources if isinstance(sources, list) else []:
            source["path"] = _absolute(source["path"])
    data["select"]["decontaminate"] = [_absolute(path) for path in data["select"]["decontaminate"]]
    if data["reflect"]["model"] is not None and data["reflect"]["endpoint"] is None:
        data["reflect"]["model"] = _absolute(data["reflect"]["model"])
    methods = data["method"] if isinstance(data["method"], list) else [data["method"]]
    entries = [*zip(methods, configs, strict=True), (data["select"]["scorer"], scorer)]
    for entry, config in entries:
        for key in file_fields(config):
            if files := entry.get(key):
                entry[key] = [_absolute(file) for file in files] if isinstance(files, list) else _absolute(files)
    for section, key in (("eval", "tasks"), ("search", "speciality"), ("search", "versatility")):
        data[section][key] = [_absolute_task(task) if isinstance(task, str) else task for task in data[section][key]]
    return data


def _absolute_task(task: str) -> str:
    """As :func:`_absolute`, of a task file or of the data in ``KIND:DATA``."""
    kind, separator, data = task.partition(":")
    is_file = separator and kind != "lm-eval"
    return f"{kind}:{_absolute(data)}" if is_file else _absolute(task)


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if Path(path).exists() else path
