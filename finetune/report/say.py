"""Plain lines on a console: paths and names stay as they are, to be copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["say"]


def say(console: Console | None, text: str) -> None:
    """Prints text that rich does not wrap, color or read as markup; without a console, nothing."""
    if console is not None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)
