"""DEITA's score: complexity of the instruction times quality of the answer, each the expected rating of a judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator

from finetune.data_selection.base import Evidence, Load, Measured, Measurer, RowScorer, Score, ScorerConfig
from finetune.data_selection.rating.uncertainty import expected_rating
from finetune.data_selection.registry import register

if TYPE_CHECKING:
    from finetune.data_selection.engine.rater import Rater
    from finetune.data_selection.pool import Example
    from finetune.data_selection.rating.tokens import RatingTokens

__all__ = ["Deita", "DeitaConfig"]

_PAIR = "Instruction:{instruction}\nResponse:{answer}"


class DeitaConfig(ScorerConfig):
    """Who rates, and what is asked; ``{instruction}``, ``{answer}`` and ``{scale}`` are filled in."""

    complexity_model: str | None = Field(
        default=None, description="Rates the instruction: as model.name_or_path; null: the recipe's model."
    )
    quality_model: str | None = Field(default=None, description="Rates the answer; null: the recipe's model.")
    complexity_prompt: str = Field(
        default="Rate how complex the instruction is, from 1 (simple) to {scale} (complex).\n\n"
        "Instruction:{instruction}\nThe rating is: \n",
        description="What is read before the rating of the instruction, word for word as its model was trained.",
    )
    quality_prompt: str = Field(
        default=f"Rate how good the response is, from 1 (bad) to {{scale}} (good).\n\n{_PAIR}\nThe rating is: \n",
        description="What is read before the rating of the answer.",
    )
    scale: int = Field(default=6, ge=2, le=9, description="The highest rating, one digit.")

    @field_validator("complexity_prompt", "quality_prompt")
    @classmethod
    def _can_be_filled_in(cls, prompt: str) -> str:
        try:
            prompt.format(scale=1, instruction="", answer="")
        except (LookupError, ValueError) as error:
            raise ValueError("text with nothing but {instruction}, {answer} and {scale} in braces") from error
        return prompt


@register("deita")
class Deita(RowScorer):
    """Scores rows by complexity times quality, summed over turns: the expected ratings of two judges.

    The judges are any two models, best those that were trained to rate: then the prompts are theirs. The rating is read
    off the next token's probabilities, never written. With ``select.diversity: 0.9`` it is the published selection.

    References:
        Liu et al., "What Makes Good Data for Alignment?", arXiv 2312.15685, section 3.
    """

    paper: ClassVar[str] = "arXiv 2312.15685"
    Config: ClassVar[type[ScorerConfig]] = DeitaConfig
    config: DeitaConfig

    def models(self, default: str) -> list[str]:
        """Returns the judge of complexity, then that of quality."""
        return [self.config.complexity_model or default, self.config.quality_model or default]

    def measurer(self, number: int, name: str, load: Load, pool: Sequence[Example]) -> Measurer:
        """Returns what asks the judge of complexity (0) or of quality (1).

        Raises:
            ConfigError: A rating is not a token of its own for that judge.
        """
        from finetune.data_selection.rating.tokens import resolve_rating_tokens

        what, prompt = (
            ("complexity", self.config.complexity_prompt),
            ("quality", self.config.quality_prompt),
        )[number]
        rater = load(name)
        contexts = [text for example in pool[:3] for text in self._texts(prompt, example)]
        tokens = resolve_rating_tokens(
            rater.tokenizer,
            contexts,
            self.config.scale,
            variants="strict",
            special=True,
            key=f"select.scorer.{what}_prompt",
        )
        return lambda batch: self._ask(rater, tokens, what, prompt, batch)

    def _ask(
        self, rater: Rater, tokens: RatingTokens, what: str, prompt: str, batch: Sequence[Example]
    ) -> list[Measured]:
        texts = [[tokens.context(text) for text in self._texts(prompt, example)] for example in batch]
        ids: list[list[int]] = rater.tokenizer([text for turns in texts for text in turns])["input_ids"]
        found = rater.next_tokens(rater.last_hidden(ids), [token for (token,) in tokens.ids])
        ratings = iter([expected_rating(log_p) for log_p in found.log_probabilities.tolist()])
        return [{what: [next(ratings) for _ in turns]} for turns in texts]

    def _texts(self, prompt: str, example: Example) -> list[str]:
        """Returns what is read, one text per turn."""
        return [
            prompt.format(scale=self.config.scale, instruction=turn.instruction, answer=turn.answer)
            for turn in example.exchanges
        ]

    def score(self, example: Example, *evidence: Evidence) -> Score:
        """Returns the sum over turns of complexity times quality."""
        complexity, quality = evidence[0]["complexity"], evidence[1]["quality"]
        return Score(sum(one * other for one, other in zip(complexity, quality, strict=True)))
