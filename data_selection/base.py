"""What a scorer is: it measures rows, most often with a model, and turns what it measured into one number per row.

:class:`Measuring` is the first half, :class:`Scorer` both, and :class:`RowScorer` one that scores each row by itself,
which is what most scorers inherit.

This module, like every module of a scorer, is imported by ``finetune ls selectors`` and ``finetune validate``, which
must answer in half a second: torch and transformers are imported inside the functions that need them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from finetune.core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data_selection.engine.rater import Rater
    from finetune.data_selection.pool import Example

__all__ = [
    "FILE",
    "Direction",
    "Evidence",
    "Load",
    "Measured",
    "Measurer",
    "Measuring",
    "RowScorer",
    "Score",
    "Scorer",
    "ScorerConfig",
    "Unscored",
]

FILE: dict[str, Any] = {"format": "path"}
"""Of a config's field that names a file (``json_schema_extra=FILE``): a selection's copy of the recipe names it by its
absolute path."""
Evidence: TypeAlias = Mapping[str, Any]
"""What was measured on one row: plain JSON values, so that it is stored as it is and read back exactly."""
Load: TypeAlias = "Callable[[str], Rater]"
"""Loads a model by its name."""
Measurer: TypeAlias = "Callable[[Sequence[Example]], list[Measured]]"
"""Measures the rows of a batch, in order."""
Direction = Literal["highest", "lowest", "middle"]
"""Which end of the scores is kept."""


@dataclass(frozen=True)
class Unscored:
    """In place of evidence where a row cannot be measured.

    Attributes:
        reason: A short reason that rows share, to count by.
        detail: What is special to this row.
        evidence: What was measured nevertheless, such as what it cost.
    """

    reason: str
    detail: str = ""
    evidence: Evidence = field(default_factory=dict)


Measured: TypeAlias = "Evidence | Unscored"


@dataclass(frozen=True)
class Score:
    """What a row scores.

    Attributes:
        value: The number to rank by.
        excluded: Why the row is not to be kept whatever it scores, or an empty string.
    """

    value: float
    excluded: str = ""


class ScorerConfig(BaseModel):
    """Base of the scorers' configs: the keys of ``select.scorer`` besides ``name``.

    Every field has a default and a description; unknown keys and values of another type are errors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Measuring:
    """Measures rows, most often with a model.

    What is measured is logged row by row, so no row is measured twice. What reads the rows alone has no
    :meth:`models` and measures nothing.

    Attributes:
        name: What it is called; of scorers the registry name, set by ``@register``.
        needs_answers: Whether plain text without an answer cannot be measured.
        unmeasured: Keys of the config that measurements do not depend on: they may change without
            measuring again.
    """

    name: ClassVar[str] = ""
    needs_answers: ClassVar[bool] = True
    unmeasured: ClassVar[frozenset[str]] = frozenset()
    Config: ClassVar[type[ScorerConfig]] = ScorerConfig
    _instead: ClassVar[str] = ""

    def __init__(self, config: ScorerConfig | None = None) -> None:
        self.config = config if config is not None else self.Config()

    def models(self, default: str) -> list[str]:
        """Returns the models that measure, one after the other; ``default`` is the recipe's."""
        return [default]

    def check(self, pool: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> None:
        """Sees that ``pool`` can be measured at all, before any weights are loaded.

        Raises:
            DataError: It cannot.
        """
        plain = next((example for example in pool if not example.conversation.messages), None)
        if self.needs_answers and plain is not None:
            raise DataError(
                f"{self.name} needs instructions and answers, and this is plain text",
                where=plain.conversation.where,
                got=repr(plain.conversation.text[:60]),
                want=f"rows with an instruction and an answer{self._instead}",
            )

    def begin(self, rater: Rater, pool: Sequence[Example]) -> None:
        """Prepares for one model; called before it measures anything, in every process.

        Args:
            rater: The model, loaded.
            pool: All rows, also those that were measured before.

        Raises:
            ConfigError: The model cannot be used for this.
        """

    def measurer(self, number: int, name: str, load: Load, pool: Sequence[Example]) -> Measurer:
        """Returns what measures batches with one of the models; whoever asks each something else overrides it.

        Args:
            number: Which of :meth:`models`.
            name: What it is called.
            load: Loads it.
            pool: All rows.
        """
        rater = load(name)
        self.begin(rater, pool)
        return functools.partial(self.measure, rater)

    def measure(self, rater: Rater, batch: Sequence[Example]) -> list[Measured]:
        """Returns what ``rater`` says of each row of a batch, in order; a function of each row alone."""
        return [{} for _ in batch]

    def fingerprint(self) -> dict[str, Any]:
        """Returns what decides the measurements besides models and rows; a change of it makes old ones useless."""
        return {"name": self.name, **self.config.model_dump(mode="json", exclude=set(self.unmeasured))}

    def spent(self, measured: Sequence[Sequence[Evidence] | Unscored]) -> dict[str, Any]:
        """Returns what measuring cost where somebody counts it, also on rows without a score; for the manifest."""
        return {}


class Scorer(Measuring, ABC):
    """Measures rows and turns what was measured into one number per row.

    Another aggregation of the same measurements needs no model.

    Attributes:
        paper: Citation with an identifier, or an empty string.
        direction: Which end of the scores is kept by default.
        unlisted: Names of evidence that is too bulky for the table of scores.
    """

    paper: ClassVar[str] = ""
    direction: ClassVar[Direction] = "highest"
    unlisted: ClassVar[frozenset[str]] = frozenset()
    _instead: ClassVar[str] = ", or a scorer that takes text: loss, perplexity, length"

    @abstractmethod
    def score_pool(self, pool: Sequence[Example], evidence: Sequence[Sequence[Evidence]]) -> list[Score]:
        """Returns the scores of rows that were all measured, in order.

        Args:
            pool: The rows.
            evidence: For each row its evidence, one per model.
        """

    def about(self) -> dict[str, Any]:
        """Returns what the manifest says of the scorer besides its name and config."""
        return {}

    def diagnose(self, evidence: Sequence[Sequence[Evidence]]) -> list[str]:
        """Returns warnings about the measurements as a whole, each with its consequence."""
        return []


class RowScorer(Scorer):
    """Scores each row by its own measurements, whatever the rest of the pool is."""

    @abstractmethod
    def score(self, example: Example, *evidence: Evidence) -> Score:
        """Returns the score of one row from its evidence, one per model."""

    def score_pool(self, pool: Sequence[Example], evidence: Sequence[Sequence[Evidence]]) -> list[Score]:
        """Returns the score of each row."""
        return [self.score(example, *found) for example, found in zip(pool, evidence, strict=True)]
