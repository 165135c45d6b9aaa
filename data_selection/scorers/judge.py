"""By the judgement of a chat model, local or behind an endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from finetune.core.errors import ConfigError
from finetune.data.records import Message
from finetune.data_selection.base import (
    Evidence,
    Load,
    Measured,
    Measurer,
    Score,
    Scorer,
    ScorerConfig,
    Unscored,
)
from finetune.data_selection.registry import register

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data_selection.chat.endpoint import Answer, Endpoint
    from finetune.data_selection.engine.rater import Rater
    from finetune.data_selection.pool import Example

__all__ = ["QUESTION", "Judge", "JudgeConfig"]

QUESTION = (
    "Rate the {criterion} of the response to the instruction, from 0 (none) to 5 (perfect); halves are allowed. Write "
    "the number alone on the first line.\n\nInstruction:\n{instruction}\n\nResponse:\n{answer}"
)
_HIGHEST = 5.0


class JudgeConfig(ScorerConfig):
    """Who judges, and what by."""

    endpoint: str | None = Field(
        default=None, description="Address of an OpenAI-compatible endpoint, up to /v1; null: a model on this machine."
    )
    model: str | None = Field(
        default=None,
        description="The judge: a name at the endpoint, or as model.name_or_path; null: the recipe's model.",
    )
    criterion: str = Field(default="accuracy", min_length=1, description="What of a response is rated.")
    max_new_tokens: int = Field(default=16, ge=1, description="Longest judgement, in tokens; its first line counts.")
    key_variable: str = Field(default="OPENAI_API_KEY", description="Environment variable with the endpoint's key.")
    timeout: float = Field(default=60, gt=0, description="Seconds that the endpoint may take to answer.")
    attempts: int = Field(default=5, ge=1, description="Requests per row before it counts as failed.")
    per_minute: int | None = Field(default=None, ge=1, description="Requests per minute, at most; null: no limit.")
    parallel: int = Field(default=8, ge=1, description="Requests under way at a time.")


@register("judge")
class Judge(Scorer):
    """Scores rows by the rating that a chat model writes for their answers, from 0 to 5, one answer per row.

    The first line of what it writes must be a number in that range; a row for which it is not has a reason in place of
    a score. A row that an endpoint failed to judge is asked about again by ``--resume``. The paper keeps 4.5 and above:
    ``select.threshold: 4.5``. Of several turns the last answer is rated.

    References:
        Chen et al., "AlpaGasus", arXiv 2307.08701, section 2.
    """

    paper: ClassVar[str] = "arXiv 2307.08701"
    Config: ClassVar[type[ScorerConfig]] = JudgeConfig
    unmeasured: ClassVar[frozenset[str]] = frozenset({"key_variable", "timeout", "attempts", "per_minute", "parallel"})
    config: JudgeConfig

    def models(self, default: str) -> list[str]:
        """Returns the judge."""
        model = self.config.model or default
        return [model if self.config.endpoint is None else f"{model} at {self.config.endpoint}"]

    def check(self, pool: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> None:
        """Sees that an endpoint has an address and a model.

        Raises:
            ConfigError: It has not.
            DataError: The rows have no answers.
        """
        super().check(pool, tokenizer)
        endpoint = self.config.endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                "the endpoint is no address",
                where="select.scorer.endpoint",
                got=endpoint,
                want="an address up to /v1, such as http://localhost:8000/v1",
            )
        if endpoint is not None and self.config.model is None:
            raise ConfigError("the endpoint serves models by name, and none is named", where="select.scorer.model")

    def measurer(self, number: int, name: str, load: Load, pool: Sequence[Example]) -> Measurer:
        """Returns what asks the judge: a model that is loaded, or the endpoint."""
        config = self.config
        if config.endpoint is None or config.model is None:
            return super().measurer(number, name, load, pool)
        from finetune.data_selection.chat.endpoint import Endpoint

        endpoint = Endpoint(
            config.endpoint,
            config.model,
            key_variable=config.key_variable,
            timeout=config.timeout,
            attempts=config.attempts,
            per_minute=config.per_minute,
            parallel=config.parallel,
        )
        return lambda batch: self._ask(endpoint, batch)

    def _ask(self, endpoint: Endpoint, batch: Sequence[Example]) -> list[Measured]:
        answers = endpoint.ask([self._question(row) for row in batch], max_new_tokens=self.config.max_new_tokens)
        return [answer if isinstance(answer, Unscored) else _measured(answer) for answer in answers]

    def _question(self, example: Example) -> list[Message]:
        exchange = example.exchanges[-1]
        asked = QUESTION.format(
            criterion=self.config.criterion, instruction=exchange.instruction, answer=exchange.answer
        )
        return [Message("user", asked)]

    def measure(self, rater: Rater, batch: Sequence[Example]) -> list[Measured]:
        """Returns the ``rating`` that a model on this machine writes, greedily.

        Raises:
            UnscorableError: A row and its judgement are longer than the model's context.
        """
        from finetune.data.render import render_prompt
        from finetune.data_selection.chat.endpoint import Answer
        from finetune.data_selection.engine.failures import UnscorableError
        from finetune.models.generate import generate

        prompts = [render_prompt(self._question(row), rater.tokenizer) for row in batch]
        limit, new = rater.context, self.config.max_new_tokens
        longest = max(map(len, prompts)) + new
        if limit is not None and longest > limit:
            raise UnscorableError("longer than the model's context", f"{longest} tokens, {limit} at most")
        texts = generate(rater.model, rater.tokenizer, prompts, max_new_tokens=new, batch_size=len(prompts))
        return [_measured(Answer(text, len(prompt), 0)) for text, prompt in zip(texts, prompts, strict=True)]

    def score(self, example: Example, *evidence: Evidence) -> Score:
        """Returns the rating."""
        return Score(evidence[0]["rating"])


def _measured(answer: Answer) -> Measured:
    lines = answer.text.strip().splitlines()
    try:
        rating = float(lines[0]) if lines else -1.0
    except ValueError:
        rating = -1.0
    if not 0 <= rating <= _HIGHEST:
        return Unscored("the judge gave no rating", repr(answer.text[:60]))
    return {"rating": rating, "prompt_tokens": answer.prompt_tokens, "new_tokens": answer.new_tokens}
