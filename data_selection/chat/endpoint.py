"""A chat model behind an OpenAI-compatible endpoint: bounded retries, a limit on the rate, no exception per row."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from finetune.core.errors import ConfigError
from finetune.data.records import Message
from finetune.data_selection.base import Unscored
from finetune.data_selection.chat.answer import Answer
from finetune.data_selection.chat.cache import AnswerCache, request_key
from finetune.data_selection.engine.failures import NO_ANSWER

if TYPE_CHECKING:
    from httpx2 import Response

__all__ = ["Endpoint"]

_TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_WRONG_ADDRESS = {401: "the key is not accepted", 403: "the key is not accepted", 404: "there is no such model or path"}
_LONGEST_WAIT = 60.0
"""Seconds between two attempts, at most."""


class Endpoint:
    """Asks one model.

    Args:
        url: Address up to ``/v1``.
        model: Name of the model there.
        key_variable: Environment variable with the key; where it is not set, none is sent.
        timeout: Seconds that an answer may take.
        attempts: Times that a request is made before it counts as failed.
        per_minute: Requests per minute, at most; None is no limit.
        parallel: Requests under way at a time.
        first_wait: Seconds before the second attempt; doubled before each further one, and shortened by chance.
        cache: Answers that were given before; None asks anew.
        section: What of the recipe is about the endpoint, for messages.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key_variable: str = "OPENAI_API_KEY",
        timeout: float = 60,
        attempts: int = 5,
        per_minute: int | None = None,
        parallel: int = 8,
        first_wait: float = 1.0,
        cache: AnswerCache | None = None,
        section: str = "select.scorer",
    ) -> None:
        import httpx2

        key = os.environ.get(key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx2.Client(headers=headers, timeout=timeout)
        self._url, self._model, self._key_variable = f"{url.rstrip('/')}/chat/completions", model, key_variable
        self._attempts, self._parallel, self._first_wait = attempts, parallel, first_wait
        self._cache, self._section = cache, section
        self._gap = 60 / per_minute if per_minute else 0.0
        self._next, self._lock = 0.0, threading.Lock()

    def ask(self, conversations: Sequence[Sequence[Message]], *, max_new_tokens: int) -> list[Answer | Unscored]:
        """Returns the answer to each conversation, in order, or why there is none.

        Raises:
            ConfigError: The endpoint refuses us whatever we ask: key, model or path are wrong.
        """
        with ThreadPoolExecutor(self._parallel) as pool:
            return list(pool.map(lambda turns: self._ask(turns, max_new_tokens), conversations))

    def _ask(self, turns: Sequence[Message], max_new_tokens: int) -> Answer | Unscored:
        asked = {
            "model": self._model,
            "messages": [{"role": turn.role, "content": turn.content} for turn in turns],
            "temperature": 0,
            "max_tokens": max_new_tokens,
        }
        key = request_key(self._url, asked)
        known = None if self._cache is None else self._cache.get(key)
        if known is not None:
            return known
        answer = self._request(asked)
        if self._cache is not None and isinstance(answer, Answer):
            self._cache.put(key, answer)
        return answer

    def _request(self, asked: dict[str, Any]) -> Answer | Unscored:
        """Asks until there is an answer, or until attempts run out."""
        import httpx2

        why = ""
        for attempt in range(self._attempts):
            self._wait_for_turn()
            try:
                response = self._client.post(self._url, json=asked)
            except httpx2.TransportError as error:
                why, wait = f"{type(error).__name__}: {error}".rstrip(": "), None
            else:
                if response.status_code not in _TRY_AGAIN:
                    return self._read(response)
                why, wait = f"HTTP {response.status_code}", response.headers.get("retry-after")
            if attempt + 1 < self._attempts:
                time.sleep(self._pause(attempt, wait))
        return Unscored(NO_ANSWER, f"{why}, {self._attempts} attempts")

    def _read(self, response: Response) -> Answer | Unscored:
        if response.status_code in _WRONG_ADDRESS:
            raise ConfigError(
                f"the endpoint refuses to answer: {_WRONG_ADDRESS[response.status_code]}",
                where=f"{self._section}.endpoint",
                got=f"HTTP {response.status_code} from {self._url}, model {self._model}",
                fix=f"the key in ${self._key_variable}, {self._section}.model, or the address up to /v1",
            )
        if response.status_code != 200:
            return Unscored("the endpoint refused the row", f"HTTP {response.status_code}: {response.text[:80]}")
        try:
            said: Any = response.json()
            text, usage = said["choices"][0]["message"]["content"], said.get("usage") or {}
        except (ValueError, LookupError, TypeError, AttributeError):
            return Unscored("the endpoint's answer is no chat completion", response.text[:80])
        if not isinstance(text, str):
            return Unscored("the endpoint's answer has no text", repr(text)[:80])
        return Answer(text, int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))

    def _wait_for_turn(self) -> None:
        with self._lock:
            now = time.monotonic()
            mine = max(now, self._next)
            self._next = mine + self._gap
        time.sleep(mine - now)

    def _pause(self, attempt: int, asked: str | None) -> float:
        """Returns the seconds before the next attempt: what the endpoint asks for, else more each time."""
        if asked is not None and asked.isdigit():
            return min(float(asked), _LONGEST_WAIT)
        longest: float = min(self._first_wait * 2.0**attempt, _LONGEST_WAIT)
        return longest * random.uniform(0.5, 1)
