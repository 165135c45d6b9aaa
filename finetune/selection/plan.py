"""What a selection recipe comes to: rows, scorer and limits, all checked before any weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.config.schema import Source
from finetune.core.errors import ConfigError, DataError, list_choices, nearest
from finetune.data.files import read_rows as read_source
from finetune.data_selection import Scorer, build_scorer
from finetune.data_selection.base import Direction
from finetune.data_selection.choice.contamination import Contamination, texts_in
from finetune.data_selection.choice.rules import Limits
from finetune.data_selection.pool import Example, Pool, load_pool
from finetune.models import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.load import LoadedRecipe
    from finetune.config.schema import Recipe

__all__ = ["SelectionPlan", "make_plan", "read_rows"]

_LIMITS = ("fraction", "top", "budget", "threshold")


@dataclass(frozen=True)
class SelectionPlan:
    """Everything that a selection needs but the models.

    Attributes:
        recipe: The resolved recipe.
        pool: The rows.
        scorer: What scores them.
        limits: How many are kept.
        direction: Which end of the scores is kept.
        contamination: Knows the evaluation data that rows must not share words with; None where there is none.
    """

    recipe: Recipe
    pool: Pool
    scorer: Scorer
    limits: Limits
    direction: Direction
    contamination: Contamination | None = None

    def source_of(self, example: Example) -> str:
        """Returns where a row is from: its file, or what ``select.source_column`` says."""
        column = self.recipe.select.source_column
        return example.conversation.source if column is None else str(example.conversation.extra[column])


def make_plan(loaded: LoadedRecipe) -> SelectionPlan:
    """Reads the rows and sees that they can be scored.

    Raises:
        ConfigError: The recipe does not say how many rows are kept, or weighs its sources.
        DataError: The rows cannot be read, or the scorer cannot score such rows.
        RegistryError: The scorer is unknown.
    """
    recipe = loaded.recipe
    section = recipe.select
    _check_limits(loaded)
    scorer = build_scorer(section.scorer)
    pool, tokenizer = read_rows(loaded)
    _check_source_column(loaded, pool)
    scorer.check(pool.examples, tokenizer)
    limits = Limits(section.top, section.fraction, section.budget, section.threshold, section.per_source)
    direction = scorer.direction if section.keep == "auto" else section.keep
    return SelectionPlan(recipe, pool, scorer, limits, direction, _contamination(recipe))


def read_rows(loaded: LoadedRecipe) -> tuple[Pool, PreTrainedTokenizerBase]:
    """Returns the rows of a recipe's sources, and the tokenizer that they are rendered with.

    Raises:
        ConfigError: A source is there twice, or has a weight.
        DataError: The rows cannot be read.
    """
    recipe = loaded.recipe
    data = recipe.data
    _check_sources(loaded)
    tokenizer = load_tokenizer(
        recipe.model.name_or_path,
        revision=recipe.model.revision,
        trust_remote_code=recipe.model.trust_remote_code,
        chat_template=data.chat_template,
    )
    pool = load_pool(
        data.train,
        tokenizer,
        format=data.format,
        columns=data.columns,
        system=data.system,
        loss_on=data.loss_on,
        max_length=data.max_length,
        truncation=data.truncation,
        on_error=data.on_error,
        max_dropped=data.max_dropped,
    )
    return pool, tokenizer


def _contamination(recipe: Recipe) -> Contamination | None:
    section = recipe.select
    rows = [row for path in section.decontaminate for _, row in read_source(Source(path=path))]
    texts = [text for row in rows if isinstance(row, dict) for text in texts_in(row)]
    return Contamination(texts, section.decontaminate_words) if rows else None


def _check_limits(loaded: LoadedRecipe) -> None:
    if all(getattr(loaded.recipe.select, name) is None for name in _LIMITS):
        raise ConfigError(
            "nothing says how many rows are kept",
            where="select",
            want=" or ".join(f"select.{name}" for name in _LIMITS),
            fix="select.fraction=0.2",
        )


def _check_sources(loaded: LoadedRecipe) -> None:
    seen: set[str] = set()
    for number, source in enumerate(loaded.recipe.data.train):
        if source.path in seen:
            raise ConfigError(
                "a selection looks at every row once, and this source is there twice",
                where=f"{loaded.origin(f'data.train.{number}.path')}  data.train.{number}.path",
                got=source.path,
                fix=f"~data.train.{number}",
            )
        seen.add(source.path)
        if source.weight != 1:
            raise ConfigError(
                "a selection looks at every row once, so a source has no weight",
                where=f"{loaded.origin(f'data.train.{number}.weight')}  data.train.{number}.weight",
                got=f"{source.weight:g}",
                fix=f"data.train.{number}.weight=1, and the weight where the subset is trained on",
            )


def _check_source_column(loaded: LoadedRecipe, pool: Pool) -> None:
    column = loaded.recipe.select.source_column
    missing = next((one for one in pool.examples if column is not None and column not in one.conversation.extra), None)
    if column is None or missing is None:
        return
    columns = sorted(missing.conversation.extra)
    raise DataError(
        f"a row has no column {column!r} that says where it is from",
        where=f"{missing.conversation.where}, {loaded.origin('select.source_column')}  select.source_column",
        want=list_choices(columns) or "a row with more columns than its conversation",
        near=nearest(column, columns),
    )
