"""Talking to a model: a conversation that keeps its history and streams its answers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from finetune.data.records import Message
from finetune.data.render import render_prompt
from finetune.models.batches import scoring
from finetune.models.generate import check_context, greedy_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatSession"]


class ChatSession:
    """A conversation with a model; answers are greedy, as in evaluation.

    Args:
        target: Run directory, its ``final`` folder, a plain model folder, hub id or bundled model.
        base: The base model, where the target does not know it.
        system: System message, or None for what the chat template does without one.
        max_new_tokens: Tokens after which an answer is cut off.
        task: Which of its tasks the model is to do, where it tells them apart.

    Attributes:
        messages: What was said so far.

    Raises:
        ConfigError: The model cannot be loaded.
        CheckpointError: The learned state is damaged or belongs to another base.
    """

    def __init__(
        self,
        target: str,
        *,
        base: str | None = None,
        system: str | None = None,
        max_new_tokens: int = 256,
        task: str | None = None,
    ) -> None:
        from finetune.models import load_tuned

        self._model, self._tokenizer = load_tuned(target, base=base, task=task)
        self._max_new_tokens = max_new_tokens
        self._system = system
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Forgets what was said."""
        self.messages[:] = [] if self._system is None else [Message("system", self._system)]

    def reply(self, message: str) -> Iterator[str]:
        """Yields the answer to ``message`` piece by piece; whoever stops reading stops the generation.

        The message and what was read of the answer become part of the conversation.

        Raises:
            DataError: The conversation is longer than the model's context; it is left as it was.
        """
        prompt = render_prompt([*self.messages, Message("user", message)], self._tokenizer)
        check_context(self._model, [prompt], self._max_new_tokens)
        self.messages.append(Message("user", message))
        pieces: list[str] = []
        try:
            for piece in _stream(self._model, self._tokenizer, prompt, self._max_new_tokens):
                pieces.append(piece)
                yield piece
        finally:
            self.messages.append(Message("assistant", "".join(pieces).strip()))


def _stream(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: list[int], max_new_tokens: int) -> Iterator[str]:
    """Yields the text that ``model`` writes after ``prompt``, as it is written."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

    pieces: queue.Queue[str | BaseException | None] = queue.Queue()
    stopped = threading.Event()

    class _Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.put(text)

    class _Stop(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), stopped.is_set(), device=input_ids.device)

    def write() -> None:
        ids = torch.tensor([prompt], device=next(model.parameters()).device)
        try:
            with scoring(model), greedy_settings(model, tokenizer, max_new_tokens):
                model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    streamer=_Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
                    stopping_criteria=StoppingCriteriaList([_Stop()]),
                )
            pieces.put(None)
        except BaseException as error:
            pieces.put(error)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        while (piece := pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            if piece:
                yield piece
    finally:
        stopped.set()
        thread.join()
