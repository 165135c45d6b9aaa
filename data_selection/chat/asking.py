"""Measuring by asking a chat model: what the judge of answers and the teacher of reflections share."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from finetune.data_selection.base import Evidence, Load, Measured, Measurer, Measuring, ScorerConfig, Unscored
from finetune.data_selection.chat.config import HOW_TO_ASK, ChatConfig, bill, check_endpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data_selection.chat.answer import Chat
    from finetune.data_selection.pool import Example

__all__ = ["Asking"]


class Asking(Measuring, ABC):
    """Measures rows by what one chat model, local or behind an endpoint, answers to questions about them.

    Attributes:
        section: What its section of the recipe is called.
    """

    section: ClassVar[str]
    unmeasured: ClassVar[frozenset[str]] = HOW_TO_ASK
    Config: ClassVar[type[ScorerConfig]] = ChatConfig
    config: ChatConfig

    @abstractmethod
    def ask(self, chat: Chat, batch: Sequence[Example]) -> list[Measured]:
        """Returns what ``chat`` says of each row of a batch, in order."""

    @abstractmethod
    def answers(self, evidence: Evidence) -> Sequence[Evidence]:
        """Returns what each answer took that a row's evidence came from."""

    def models(self, default: str) -> list[str]:
        """Returns who is asked."""
        model = self.config.model or default
        return [model if self.config.endpoint is None else f"{model} at {self.config.endpoint}"]

    def check(self, pool: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> None:
        """Sees that there is somebody to ask.

        Raises:
            ConfigError: The endpoint has no address or no model.
            DataError: The rows have no answers.
        """
        super().check(pool, tokenizer)
        check_endpoint(self.config, self.section)

    def measurer(self, number: int, name: str, load: Load, pool: Sequence[Example]) -> Measurer:
        """Returns what asks: a model that is loaded, or the endpoint."""
        from finetune.data_selection.chat.connect import connect

        return functools.partial(self.ask, connect(self.config, name, load, self.section))

    def spent(self, measured: Sequence[Sequence[Evidence] | Unscored]) -> dict[str, Any]:
        """Returns the bill; an answer that was no use costs as much as others."""
        evidence = [row.evidence if isinstance(row, Unscored) else row[0] for row in measured]
        return bill(self.config, [answer for row in evidence for answer in self.answers(row)])
