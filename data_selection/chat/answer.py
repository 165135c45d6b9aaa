"""What a chat model answered, wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from finetune.data.records import Message
from finetune.data_selection.base import Unscored

__all__ = ["Answer", "Chat"]


@dataclass(frozen=True)
class Answer:
    """What the model wrote.

    Attributes:
        text: The text.
        prompt_tokens: Tokens that it read, as the endpoint counts them; 0 where it does not say.
        new_tokens: Tokens that it wrote.
        cached: Whether it was written before, to the same request.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    cached: bool = False

    @property
    def spent(self) -> dict[str, Any]:
        """What a bill is made of."""
        return {"prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens, "cached": self.cached}


class Chat(Protocol):
    """A model that answers in words."""

    def ask(self, conversations: Sequence[Sequence[Message]], *, max_new_tokens: int) -> list[Answer | Unscored]:
        """Returns the answer to each conversation, in order, or why there is none."""
