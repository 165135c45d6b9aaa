"""Who is asked: a chat model on this machine, or one behind an endpoint that speaks the OpenAI protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from finetune.core.errors import ConfigError
from finetune.data_selection.base import ScorerConfig

__all__ = ["HOW_TO_ASK", "ChatConfig", "bill", "check_endpoint"]

HOW_TO_ASK = frozenset(
    {"key_variable", "timeout", "attempts", "per_minute", "parallel", "prompt_price", "answer_price", "cache"}
)
"""Keys that no answer depends on."""


class ChatConfig(ScorerConfig):
    """The keys of whatever asks a chat model."""

    endpoint: str | None = Field(
        default=None, description="Address of an OpenAI-compatible endpoint, up to /v1; null: a model on this machine."
    )
    model: str | None = Field(
        default=None,
        description="Who is asked: a name at the endpoint, or as model.name_or_path; null: the recipe's model.",
    )
    key_variable: str = Field(default="OPENAI_API_KEY", description="Environment variable with the endpoint's key.")
    timeout: float = Field(default=60, gt=0, description="Seconds that the endpoint may take to answer.")
    attempts: int = Field(default=5, ge=1, description="Requests per question before it counts as failed.")
    per_minute: int | None = Field(default=None, ge=1, description="Requests per minute, at most; null: no limit.")
    parallel: int = Field(default=8, ge=1, description="Requests under way at a time.")
    prompt_price: float | None = Field(
        default=None, ge=0, description="Price of a million tokens that the endpoint reads, for the bill; null: none."
    )
    answer_price: float | None = Field(default=None, ge=0, description="Price of a million tokens that it writes.")
    cache: bool = Field(
        default=True, description="Whether what an endpoint answered before, to the same request, is not asked again."
    )


def check_endpoint(config: ChatConfig, section: str) -> None:
    """Sees that an endpoint has an address and a model.

    Args:
        config: Who is asked.
        section: What its section of the recipe is called.

    Raises:
        ConfigError: It has not.
    """
    if config.endpoint is None:
        return
    if not config.endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            "the endpoint is no address",
            where=f"{section}.endpoint",
            got=config.endpoint,
            want="an address up to /v1, such as http://localhost:8000/v1",
        )
    if config.model is None:
        raise ConfigError("the endpoint serves models by name, and none is named", where=f"{section}.model")


def bill(config: ChatConfig, answers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what answers took: ``answers``, ``from_cache``, ``prompt_tokens``, ``new_tokens``, ``cost``.

    Tokens and cost are those of the answers that were not in the cache; without a price there is no cost.

    Args:
        config: Who was asked.
        answers: Of each answer its ``prompt_tokens``, ``new_tokens`` and whether it was ``cached``.
    """
    counted = list(answers)
    paid = [answer for answer in counted if not answer["cached"]]
    read, written = (sum(answer[name] for answer in paid) for name in ("prompt_tokens", "new_tokens"))
    prices = config.prompt_price, config.answer_price
    cost = (read * (prices[0] or 0.0) + written * (prices[1] or 0.0)) / 1e6
    return {
        "answers": len(counted),
        "from_cache": len(counted) - len(paid),
        "prompt_tokens": read,
        "new_tokens": written,
        "cost": None if prices == (None, None) else cost,
    }
