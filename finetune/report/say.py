"""Plain lines on a console: paths and names stay as they are, to be copied."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["say", "say_log"]


def say(console: Console | None, text: str) -> None:
    """Prints text that rich does not wrap, color or read as markup; without a console, nothing."""
    if console is not None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)


class _SayHandler(logging.Handler):
    def __init__(self, console: Console | None) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        say(self._console, record.getMessage())


@contextlib.contextmanager
def say_log(console: Console | None) -> Iterator[None]:
    """Prints what the package logs, from level INFO on, for a while."""
    logger, handler = logging.getLogger("finetune"), _SayHandler(console)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
