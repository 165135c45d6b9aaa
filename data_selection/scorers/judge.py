"""By the judgement of a chat model, local or behind an endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from finetune.data.records import Message
from finetune.data_selection.base import Evidence, Measured, RowScorer, Score, ScorerConfig, Unscored
from finetune.data_selection.chat.asking import Asking
from finetune.data_selection.chat.config import ChatConfig
from finetune.data_selection.registry import register

if TYPE_CHECKING:
    from finetune.data_selection.chat.answer import Answer, Chat
    from finetune.data_selection.pool import Example

__all__ = ["QUESTION", "Judge", "JudgeConfig"]

QUESTION = (
    "Rate the {criterion} of the response to the instruction, from 0 (none) to 5 (perfect); halves are allowed. Write "
    "the number alone on the first line.\n\nInstruction:\n{instruction}\n\nResponse:\n{answer}"
)
_HIGHEST = 5.0


class JudgeConfig(ChatConfig):
    """Who judges, and what by."""

    criterion: str = Field(default="accuracy", min_length=1, description="What of a response is rated.")
    max_new_tokens: int = Field(default=16, ge=1, description="Longest judgement, in tokens; its first line counts.")


@register("judge")
class Judge(Asking, RowScorer):
    """Scores rows by the rating that a chat model writes for their answers, from 0 to 5, one answer per row.

    The first line of what it writes must be a number in that range; a row for which it is not has a reason in place of
    a score. A row that an endpoint failed to judge is asked about again by ``--resume``. The paper keeps 4.5 and above:
    ``select.threshold: 4.5``. Of several turns the last answer is rated.

    References:
        Chen et al., "AlpaGasus", arXiv 2307.08701, section 2.
    """

    paper: ClassVar[str] = "arXiv 2307.08701"
    Config: ClassVar[type[ScorerConfig]] = JudgeConfig
    section: ClassVar[str] = "select.scorer"
    config: JudgeConfig

    def ask(self, chat: Chat, batch: Sequence[Example]) -> list[Measured]:
        """Returns ``rating``, and what the answer took."""
        answers = chat.ask([self._question(row) for row in batch], max_new_tokens=self.config.max_new_tokens)
        return [answer if isinstance(answer, Unscored) else _measured(answer) for answer in answers]

    def _question(self, example: Example) -> list[Message]:
        exchange = example.exchanges[-1]
        asked = QUESTION.format(
            criterion=self.config.criterion, instruction=exchange.instruction, answer=exchange.answer
        )
        return [Message("user", asked)]

    def score(self, example: Example, *evidence: Evidence) -> Score:
        """Returns the rating."""
        return Score(evidence[0]["rating"])

    def answers(self, evidence: Evidence) -> Sequence[Evidence]:
        """Returns the one answer."""
        return [evidence] if evidence else []


def _measured(answer: Answer) -> Measured:
    lines = answer.text.strip().splitlines()
    try:
        rating = float(lines[0]) if lines else -1.0
    except ValueError:
        rating = -1.0
    if not 0 <= rating <= _HIGHEST:
        return Unscored("the judge gave no rating", repr(answer.text[:60]), answer.spent)
    return {"rating": rating, **answer.spent}
