"""``select.scorer``: the scorer's own config, found through the registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from finetune.config.check import Checked, check
from finetune.config.given import Given
from finetune.config.schema import SelectSection, name_scorer
from finetune.core.errors import Problem, RegistryError, list_choices
from finetune.core.registry import canonical_name

__all__ = ["CheckedScorer", "ScorerSection", "check_scorer", "scorer_configs"]

_KEY = "select.scorer"


class ScorerSection:
    """The scorer of a recipe.

    Attributes:
        name: Registry name.
        config: Its config.
    """

    def __init__(self, name: str, config: BaseModel) -> None:
        self.name = name
        self.config = config

    def as_given(self) -> dict[str, Any]:
        """Returns the section with the keys that were given, each of its right type."""
        return {"name": self.name, **self.config.model_dump(mode="json", exclude_unset=True)}

    def complete(self) -> dict[str, Any]:
        """Returns the section with all keys."""
        return {"name": self.name, **self.config.model_dump(mode="json")}


@dataclass(frozen=True)
class CheckedScorer:
    """What a check came to.

    Attributes:
        value: The scorer, or None where something is wrong.
        problems: All that is wrong.
        warnings: What was understood although it was written otherwise.
    """

    value: ScorerSection | None = None
    problems: Sequence[Problem] = ()
    warnings: Sequence[str] = ()


def check_scorer(given: Given, section: Any, known: list[str]) -> CheckedScorer:
    """Returns the scorer that ``section`` (None: the default) means, or what is wrong with it."""
    from finetune.data_selection import discover

    section = name_scorer(SelectSection.model_fields["scorer"].default if section is None else section)
    if not isinstance(section, dict):
        # That it is no mapping is said of the whole recipe.
        return CheckedScorer()
    own = dict(section)
    name = own.pop("name", None)
    if not isinstance(name, str):
        problem = Problem("the scorer has no name", given.where(_KEY), want=list_choices(discover()))
        return CheckedScorer(None, [problem])
    try:
        config = discover().get(name, where=given.where(f"{_KEY}.name")).Config
    except RegistryError as error:
        return CheckedScorer(None, error.problems)
    checked: Checked[Any] = check(config, own, given, prefix=f"{_KEY}.", known=known)
    value = None if checked.value is None else ScorerSection(canonical_name(name), checked.value)
    return CheckedScorer(value, checked.problems, checked.warnings)


def scorer_configs(section: Any) -> list[type[BaseModel]]:
    """Returns the config of the scorer that ``section`` names, if it exists."""
    from finetune.data_selection import discover

    section = name_scorer(SelectSection.model_fields["scorer"].default if section is None else section)
    name = section.get("name") if isinstance(section, dict) else None
    return [discover().get(name).Config] if isinstance(name, str) and name in discover() else []
