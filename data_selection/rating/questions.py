"""A rated pair as tokens: one sequence per rating prompt, cut in the middle of the answer where it is too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from finetune.data_selection.engine.failures import UnscorableError
from finetune.data_selection.pool import Example, Exchange
from finetune.data_selection.rating.prompts import RatingForm
from finetune.data_selection.rating.tokens import Variants, resolve_rating_tokens

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

__all__ = ["Question", "Questions", "Turns"]

Turns = Literal["joint", "mean", "last"]
"""Of several turns: all as one pair, each as a pair of its own, or the last question and answer alone."""

_CUT = " … "


@dataclass(frozen=True)
class Question:
    """What a model reads before it rates one example.

    Attributes:
        tokens: Token ids, one sequence per prompt.
        truncated: Whether something of the example was left out.
    """

    tokens: Sequence[list[int]]
    truncated: bool


class Questions:
    """Turns examples into what a model reads.

    Args:
        tokenizer: Of the model that rates.
        form: How prompt and example are put together.
        prompts: The rating prompts.
        probes: Some examples to find the ratings' tokens with.
        scale: The highest rating.
        variants: Which spellings of a rating count.
        turns: What of a conversation with several turns is rated.

    Raises:
        ConfigError: A rating is not a token of its own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        form: RatingForm,
        prompts: Sequence[str],
        probes: Sequence[Example],
        *,
        scale: int,
        variants: Variants,
        turns: Turns,
    ) -> None:
        self._tokenizer, self._form, self._prompts, self._turns = tokenizer, form, prompts, turns
        # A chat template has its special tokens in its text.
        self._special = not form.chat
        pairs = [pair for probe in probes for pair in self._exchanges(probe)]
        contexts = [form.text(prompt, pair, tokenizer) for pair in pairs for prompt in prompts]
        # The last that is read before a rating: the assistant's words where it has said some, else the cue.
        key = "select.scorer.assistant_prefix" if form.chat else "select.scorer.cue"
        self._ratings = resolve_rating_tokens(
            tokenizer, contexts, scale, variants=variants, special=self._special, key=key
        )

    @property
    def rating_ids(self) -> list[int]:
        """The ids that spell the ratings 1..K, in order; several of one rating stand together."""
        return [token for ids in self._ratings.ids for token in ids]

    def merged(self, log_p_NI: Tensor) -> Tensor:
        """Adds up the probabilities of the ids (I) of each rating; returns log-probabilities, (N, K)."""
        import torch

        parts = torch.split(log_p_NI, [len(ids) for ids in self._ratings.ids], dim=1)
        return torch.stack([part.logsumexp(1) for part in parts], dim=1)

    def of(self, example: Example, limit: int | None) -> list[Question]:
        """Returns one question, or with ``turns: mean`` one per turn, with sequences of at most ``limit`` tokens.

        Where the example does not fit, the middle of its answer is left out, and then that of its instruction; the
        prompt and the cue always stay.

        Raises:
            UnscorableError: They do not fit by themselves.
        """
        return [self._about(pair, limit) for pair in self._exchanges(example)]

    def _about(self, exchange: Exchange, limit: int | None) -> Question:
        tokens = self._tokens(exchange)
        over = 0 if limit is None else max(map(len, tokens)) - limit
        if over <= 0:
            return Question(tokens, truncated=False)
        left_out = over
        while over > 0:
            answer = self._without_middle(exchange.answer, left_out)
            instruction = exchange.instruction
            if answer == _CUT:
                more = left_out - self._count(exchange.answer)
                instruction = self._without_middle(exchange.instruction, max(0, more))
            tokens = self._tokens(Exchange(instruction, answer))
            over = max(map(len, tokens)) - (limit or 0)
            if over > 0 and instruction == _CUT == answer:
                raise UnscorableError("the rating prompt does not fit into the model's context", f"{limit} tokens")
            left_out += max(1, over)
        return Question(tokens, truncated=True)

    def _exchanges(self, example: Example) -> list[Exchange]:
        exchanges = list(example.exchanges)
        if self._turns == "mean":
            return exchanges
        if self._turns == "last" or len(exchanges) == 1:
            return exchanges[-1:]
        # Later turns carry the labels of the first one, which the form puts before the whole.
        later = "".join(f"\nInstruction:{turn.instruction}\nResponse:{turn.answer}" for turn in exchanges[1:])
        return [Exchange(exchanges[0].instruction, exchanges[0].answer + later)]

    def _tokens(self, exchange: Exchange) -> list[list[int]]:
        texts = [self._form.text(prompt, exchange, self._tokenizer) for prompt in self._prompts]
        texts = [self._ratings.context(text) for text in texts]
        found: list[list[int]] = self._tokenizer(texts, add_special_tokens=self._special)["input_ids"]
        return found

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _without_middle(self, text: str, tokens: int) -> str:
        """Returns ``text`` without so many tokens in its middle, or the mark of a cut alone."""
        if tokens <= 0:
            return text
        offsets = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        kept = len(offsets) - tokens
        if kept <= 1:
            return _CUT
        head, tail = (kept + 1) // 2, kept // 2
        return text[: offsets[head - 1][1]] + _CUT + (text[offsets[-tail][0] :] if tail else "")
