"""From a config to the chat model that it names."""

from __future__ import annotations

from finetune.core.files import cache_folder
from finetune.data_selection.base import Load
from finetune.data_selection.chat.answer import Chat
from finetune.data_selection.chat.cache import AnswerCache
from finetune.data_selection.chat.config import ChatConfig
from finetune.data_selection.chat.endpoint import Endpoint
from finetune.data_selection.chat.local import LocalChat

__all__ = ["connect"]


def connect(config: ChatConfig, name: str, load: Load, section: str) -> Chat:
    """Returns the chat model of a config.

    Args:
        config: Who is asked, and how.
        name: The model, where it is on this machine.
        load: Loads it.
        section: What the config's section of the recipe is called in messages.
    """
    if config.endpoint is None or config.model is None:
        return LocalChat(load(name))
    return Endpoint(
        config.endpoint,
        config.model,
        key_variable=config.key_variable,
        timeout=config.timeout,
        attempts=config.attempts,
        per_minute=config.per_minute,
        parallel=config.parallel,
        cache=AnswerCache(cache_folder() / "answers.sqlite") if config.cache else None,
        section=section,
    )
