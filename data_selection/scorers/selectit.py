"""SelectIT: the model rates each pair, and its uncertainty about the rating counts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from finetune.core.errors import ConfigError
from finetune.data_selection.base import FILE, Evidence, Measured, RowScorer, Score, ScorerConfig
from finetune.data_selection.rating.uncertainty import (
    Normalization,
    model_level,
    rating_shares,
    sentence_level,
    token_level,
)
from finetune.data_selection.registry import register

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data_selection.engine.rater import Rater
    from finetune.data_selection.pool import Example
    from finetune.data_selection.rating.questions import Questions

__all__ = ["SelectIt", "SelectItConfig"]

_LEAST_MASS, _MOST_OF_ONE, _MOST_OTHERS = 0.2, 0.9, 0.5


class SelectItConfig(ScorerConfig):
    """How the model is asked, and how its ratings become a score."""

    models: list[str] = Field(
        default=[], description="Models that rate, for the model level; empty: the recipe's model alone."
    )
    weights: list[float] | None = Field(
        default=None, description="Weight of each model; null: its share of all their parameters."
    )
    num_prompts: int = Field(default=5, ge=1, description="Rating prompts, the first of the set; 1: token level.")
    scale: int = Field(default=5, ge=2, le=9, description="The highest rating; one digit, since one token is read.")
    alpha: float = Field(default=0.2, ge=0, description="How much disagreement among the prompts lowers a score.")
    normalization: Normalization = Field(
        default="paper", description="official: a second softmax over the ratings' shares, as in the published code."
    )
    order: Literal["official", "example_first"] = Field(
        default="official",
        description="official: prompt, then example; example_first: the reverse, which is faster: prompts share it.",
    )
    form: Literal["plain", "chat"] = Field(default="plain", description="Plain text, or a turn in the chat template.")
    cue: str = Field(default="The answer is: \n", description="What stands before the rating.")
    assistant_prefix: str = Field(default="", description="What the assistant has said already; for form chat.")
    rating_prompts: str | None = Field(
        default=None,
        description="Text file with one prompt per line, {scale} for the highest rating; null: five of our own.",
        json_schema_extra=FILE,
    )
    digit_variants: Literal["strict", "merge"] = Field(
        default="strict", description="merge: a rating after a space counts as well, where that is another token."
    )
    turns: Literal["joint", "mean", "last"] = Field(
        default="joint",
        description="Of several turns: all of them as one pair, the mean of the scores of each, or the last one.",
    )


@register("selectit")
class SelectIt(RowScorer):
    """Scores rows by the model's own rating of them, lowered by its uncertainty; nothing is generated.

    Only the probabilities of the ratings 1..K as the next token are read. Token level: the likeliest rating times the
    confidence in it. Sentence level: the mean over several rating prompts, divided by one plus ``alpha`` times their
    standard deviation. Model level: the mean over several models, weighted by their numbers of parameters. Below about
    7 B parameters models do not answer the question, and the ranking is noise: warnings say so.

    References:
        Liu et al., "SelectIT", arXiv 2402.16705, section 3. The published code differs from it: ``normalization`` and
        ``weights`` give its results.
    """

    paper: ClassVar[str] = "arXiv 2402.16705"
    Config: ClassVar[type[ScorerConfig]] = SelectItConfig
    unmeasured: ClassVar[frozenset[str]] = frozenset({"alpha", "normalization", "weights"})
    config: SelectItConfig

    def models(self, default: str) -> list[str]:
        """Returns those of the config, else the recipe's."""
        return list(self.config.models) or [default]

    def check(self, pool: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> None:
        """Sees that there are prompts and weights enough, and that every rating is a token.

        Raises:
            ConfigError: There are not, or it is not.
            DataError: The rows have no answers.
        """
        super().check(pool, tokenizer)
        models, weights = self.models(""), self.config.weights
        if weights is not None and len(weights) != len(models):
            raise ConfigError(
                "every model has a weight, or none has",
                where="select.scorer.weights",
                got=f"{len(weights)} weights, {len(models)} models",
            )
        if not self.config.models:
            self._ask(tokenizer, pool)

    def begin(self, rater: Rater, pool: Sequence[Example]) -> None:
        """Finds the ratings' tokens, and whether prefixes can be shared with this model."""
        from finetune.data_selection.engine.prefixes import can_share

        self._questions = self._ask(rater.tokenizer, pool)
        probes = [question.tokens for example in pool[:2] for question in self._questions.of(example, rater.context)]
        self._shares = can_share(rater, probes)
        self._parameters = rater.model.num_parameters()

    def _ask(self, tokenizer: PreTrainedTokenizerBase, pool: Sequence[Example]) -> Questions:
        from finetune.data_selection.rating.prompts import RatingForm
        from finetune.data_selection.rating.questions import Questions

        config = self.config
        form = RatingForm(config.order, config.form == "chat", config.cue, config.assistant_prefix)
        return Questions(
            tokenizer,
            form,
            self._prompts(),
            pool[:3],
            scale=config.scale,
            variants=config.digit_variants,
            turns=config.turns,
        )

    def _prompts(self) -> list[str]:
        from finetune.data_selection.rating.prompts import read_prompts

        return read_prompts(self.config.rating_prompts, self.config.num_prompts, self.config.scale)

    def measure(self, rater: Rater, batch: Sequence[Example]) -> list[Measured]:
        """Returns per row the log-probability of each rating after each prompt, and what diagnoses need."""
        from finetune.data_selection.engine.prefixes import last_hidden

        by_row = [self._questions.of(example, rater.context) for example in batch]
        asked = [question for questions in by_row for question in questions]
        grid = [question.tokens for question in asked]
        # What the texts of a family have in common is computed once: the example, or else the prompt.
        across = self.config.order == "official"
        families = [list(family) for family in zip(*grid, strict=True)] if across else grid
        hidden_ND = last_hidden(rater, families, shared=self._shares)
        found = rater.next_tokens(hidden_ND, self._questions.rating_ids)
        log_p_NK = self._questions.merged(found.log_probabilities).tolist()
        is_rating_N = [token in self._questions.rating_ids for token in found.likeliest.tolist()]
        count = self.config.num_prompts
        places = iter(
            [number + at * len(asked) if across else number * count + at for at in range(count)]
            for number in range(len(asked))
        )
        measured: list[Measured] = []
        for questions in by_row:
            own = [place for _ in questions for place in next(places)]
            measured.append(
                {
                    "log_p": [log_p_NK[place] for place in own],
                    "likeliest_is_rating": sum(is_rating_N[place] for place in own) / len(own),
                    "truncated": any(question.truncated for question in questions),
                    "parameters": self._parameters,
                }
            )
        return measured

    def score(self, example: Example, *evidence: Evidence) -> Score:
        """Returns the score of the highest level that there is: of models, prompts, or ratings."""
        config = self.config
        sizes = [found["parameters"] for found in evidence]
        weights = [size / sum(sizes) for size in sizes] if config.weights is None else config.weights
        by_model = []
        for found in evidence:
            levels = [token_level(rating_shares(log_p), config.normalization) for log_p in found["log_p"]]
            turns = [levels[at : at + config.num_prompts] for at in range(0, len(levels), config.num_prompts)]
            by_model.append(statistics.fmean(sentence_level(turn, config.alpha) for turn in turns))
        return Score(model_level(by_model, weights))

    def fingerprint(self) -> dict[str, Any]:
        """Returns the config, with the prompts themselves in place of their file's name."""
        return {**super().fingerprint(), **self.about(), "rating_prompts": None}

    def about(self) -> dict[str, Any]:
        """Returns the hash of the prompt set."""
        from finetune.data_selection.rating.prompts import prompt_hash

        return {"prompt_set": prompt_hash(self._prompts())}

    def diagnose(self, evidence: Sequence[Sequence[Evidence]]) -> list[str]:
        """Returns a warning for each sign that a model does not answer the question."""
        import math

        notes = []
        for number, model in enumerate(self.models("the model")):
            rows = [row[number] for row in evidence]
            asked = [log_p for row in rows for log_p in row["log_p"]]
            mass = statistics.fmean(sum(map(math.exp, log_p)) for log_p in asked)
            best = Counter(max(range(len(log_p)), key=log_p.__getitem__) + 1 for log_p in asked)
            rating, times = best.most_common(1)[0]
            others = 1 - statistics.fmean(row["likeliest_is_rating"] for row in rows)
            noise = f"so the ranking by {model} is close to noise"
            if mass < _LEAST_MASS:
                notes.append(f"the ratings have {mass:.0%} of the next token's probability on average, {noise}")
            if times > _MOST_OF_ONE * len(asked):
                notes.append(f"{times / len(asked):.0%} of all ratings are {rating}, {noise}")
            if others > _MOST_OTHERS:
                notes.append(f"after {others:.0%} of the prompts the likeliest token is no rating, {noise}")
        return notes
