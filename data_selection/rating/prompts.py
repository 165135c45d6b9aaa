"""What a model is asked before it rates: the prompts, and the text around them and the rated pair."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finetune.core.errors import ConfigError, nearest
from finetune.data.records import Message
from finetune.data.render import prompt_text
from finetune.data_selection.pool import Exchange

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RATING_PROMPTS", "RatingForm", "prompt_hash", "read_prompts"]

RATING_PROMPTS = (
    "Score how well the assistant answers, from 1 (worst) to {scale} (best): does it do what the instruction asks, and "
    "is what it says correct? Give the score alone.",
    "Assign a number between 1 and {scale}, {scale} being the best, to the assistant's response for its accuracy and "
    "for following the instruction; reply with the number only.",
    "From 1 to {scale}, where {scale} is best, rate whether the assistant follows the instruction and responds "
    "accurately. Write nothing but the rating.",
    "Judge the assistant by two things, that its response is accurate and that it follows the instruction, on a scale "
    "of 1 (worst) to {scale} (best). Answer with one number.",
    "Evaluate the response of the assistant: is it true, and is it what the instruction wants? Use only one number, "
    "from 1 for the worst to {scale} for the best.",
)
"""One scale, one direction, said in every prompt; what differs is the wording."""


def read_prompts(file: str | None, count: int, scale: int) -> list[str]:
    """Returns the first ``count`` rating prompts of a text file with one per line; None is our own set.

    Raises:
        ConfigError: There are fewer, or the file cannot be read.
    """
    prompts = RATING_PROMPTS if file is None else _prompts_in(Path(file))
    if len(prompts) < count:
        raise ConfigError(
            "there are fewer rating prompts than asked for",
            where="select.scorer.num_prompts",
            got=str(count),
            want=f"at most {len(prompts)}",
            fix=f"select.scorer.num_prompts={len(prompts)}, or a longer file in select.scorer.rating_prompts",
        )
    return [prompt.replace("{scale}", str(scale)) for prompt in prompts[:count]]


def _prompts_in(file: Path) -> Sequence[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise ConfigError(
            "the file with rating prompts does not exist",
            where="select.scorer.rating_prompts",
            got=str(file),
            near=nearest(file.name, [sibling.name for sibling in file.parent.glob("*")]),
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the file with rating prompts cannot be read",
            where="select.scorer.rating_prompts",
            got=f"{file}: {error}",
            want="text in UTF-8, one prompt per line",
        ) from error
    return [line.strip() for line in lines if line.strip()]


def prompt_hash(prompts: Sequence[str]) -> str:
    """Returns 16 hexadecimal digits over the prompts."""
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RatingForm:
    """How a prompt and the pair that it is about become what the model reads.

    Attributes:
        order: ``official``: prompt, pair, cue; ``example_first``: pair, prompt, cue, so that prompts share the pair.
        chat: Whether that is a user's turn in the chat template.
        cue: Stands before the rating.
        assistant_prefix: What the assistant has said already, where there is a chat template.
    """

    order: Literal["official", "example_first"]
    chat: bool
    cue: str
    assistant_prefix: str

    def text(self, prompt: str, exchange: Exchange, tokenizer: PreTrainedTokenizerBase) -> str:
        """Returns what the model reads, up to where it writes a rating."""
        pair = f"Instruction:{exchange.instruction}\nResponse:{exchange.answer}"
        first, second = (prompt, pair) if self.order == "official" else (pair, prompt)
        asked = f"{first}\n\n{second}\n{self.cue}"
        return asked if not self.chat else prompt_text([Message("user", asked)], tokenizer) + self.assistant_prefix
