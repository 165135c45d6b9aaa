"""Which token is a rating: found by tokenising what the model reads with the rating after it, never by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from finetune.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RatingTokens", "Variants", "resolve_rating_tokens"]

Variants = Literal["strict", "merge"]
"""``merge`` also counts a rating that the model would write after a space."""


@dataclass(frozen=True)
class RatingTokens:
    """The tokens of the ratings 1..K.

    Attributes:
        ids: For each rating the ids that spell it.
        without_space: Whether the white space at the end of what the model reads belongs to the ratings, and is left
            away there.
    """

    ids: Sequence[Sequence[int]]
    without_space: bool

    def context(self, text: str) -> str:
        """Returns what the model reads before a rating."""
        return text.rstrip() if self.without_space else text


def resolve_rating_tokens(
    tokenizer: PreTrainedTokenizerBase,
    contexts: Sequence[str],
    scale: int,
    *,
    variants: Variants,
    special: bool,
    key: str,
) -> RatingTokens:
    """Returns the tokens that spell the ratings after ``contexts``.

    Args:
        tokenizer: Of the model that rates.
        contexts: What the model reads, several different texts.
        scale: The highest rating, one digit.
        variants: Which spellings count.
        special: Whether the tokenizer adds its special tokens to such texts.
        key: The key of the recipe that says how such texts end.

    Raises:
        ConfigError: A rating is not one token of its own after each of them, as where a tokenizer merges digits with
            what stands before.
    """
    ratings = [str(number) for number in range(1, scale + 1)]
    for without_space, space in ((False, ""), (True, " ")):
        texts = [text.rstrip() for text in contexts] if without_space else contexts
        found = [[_single(tokenizer, text, space + rating, special) for rating in ratings] for text in texts]
        first = found[0]
        if all(ids == first for ids in found) and None not in first and len(set(first)) == scale:
            own = [[token] for token in first if token is not None]
            if variants == "merge":
                others = [rating if space else f" {rating}" for rating in ratings]
                own = [
                    ids + _variant(tokenizer, texts, other, special, ids)
                    for ids, other in zip(own, others, strict=True)
                ]
            return RatingTokens(own, without_space)
    raise ConfigError(
        "the tokenizer does not spell every rating as one token of its own",
        where=key,
        got=_pieces(tokenizer, contexts[0], ratings, special),
        want=f"one token for each of {', '.join(ratings)} after the text",
        fix=f"another end of {key}, such as a newline, or another model",
    )


def _single(tokenizer: PreTrainedTokenizerBase, context: str, rating: str, special: bool) -> int | None:
    """Returns the one token that ``rating`` adds to ``context``, or None.

    White space at the end of the context may be split in another way once a rating follows, as long as none of it goes
    over into the rating.
    """
    before = tokenizer(context, add_special_tokens=special)["input_ids"]
    whole = tokenizer(context + rating, add_special_tokens=special)["input_ids"]
    return int(whole[-1]) if tokenizer.decode(whole[:-1]) == tokenizer.decode(before) else None


def _variant(
    tokenizer: PreTrainedTokenizerBase, contexts: Sequence[str], rating: str, special: bool, known: Sequence[int]
) -> list[int]:
    found = {_single(tokenizer, context, rating, special) for context in contexts}
    return [token for token in found if token is not None and len(found) == 1 and token not in known]


def _pieces(tokenizer: PreTrainedTokenizerBase, context: str, ratings: Sequence[str], special: bool) -> str:
    """Returns how the end of the context and each rating are tokenised."""
    shown = []
    for rating in ratings:
        ids = tokenizer(context + rating, add_special_tokens=special)["input_ids"]
        shown.append(f"{rating}: {tokenizer.convert_ids_to_tokens(ids[-2:])}")
    return "; ".join(shown)
