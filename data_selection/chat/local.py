"""A chat model on this machine, greedy, in batches."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.data.records import Message
from finetune.data.render import render_prompt
from finetune.data_selection.base import Unscored
from finetune.data_selection.chat.answer import Answer
from finetune.data_selection.engine.rater import Rater
from finetune.models.generate import generate

__all__ = ["LocalChat"]


class LocalChat:
    """Asks a model that is loaded.

    Args:
        rater: The model.
    """

    def __init__(self, rater: Rater) -> None:
        self._rater = rater

    def ask(self, conversations: Sequence[Sequence[Message]], *, max_new_tokens: int) -> list[Answer | Unscored]:
        """Returns the answer to each conversation, in order; none where it would not fit into the model's context."""
        rater, limit = self._rater, self._rater.context
        prompts = [render_prompt(turns, rater.tokenizer) for turns in conversations]
        fits = [prompt for prompt in prompts if limit is None or len(prompt) + max_new_tokens <= limit]
        texts = iter(
            generate(rater.model, rater.tokenizer, fits, max_new_tokens=max_new_tokens, batch_size=max(1, len(fits)))
        )
        found: list[Answer | Unscored] = []
        for prompt in prompts:
            if limit is not None and len(prompt) + max_new_tokens > limit:
                detail = f"{len(prompt) + max_new_tokens} tokens, {limit} at most"
                found.append(Unscored("longer than the model's context", detail))
                continue
            text = next(texts)
            written = len(rater.tokenizer(text, add_special_tokens=False)["input_ids"])
            found.append(Answer(text, len(prompt), written))
        return found
