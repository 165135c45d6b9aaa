"""Options that every verb takes, wherever they stand on the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["COMMON_OPTIONS", "Settings"]

COMMON_OPTIONS = (
    "Every verb takes --debug (tracebacks, more logs), -q or --quiet (warnings and errors only), --no-color."
)


@dataclass
class Settings:
    """How the command talks.

    Attributes:
        debug: Whether tracebacks are shown.
        quiet: Whether only warnings and errors are shown.
        color: Whether colour may be used on a terminal.
        launcher_arguments: What followed ``--``.
        arguments: The rest of the command line.
    """

    debug: bool = False
    quiet: bool = False
    color: bool = True
    launcher_arguments: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, arguments: Sequence[str]) -> Settings:
        """Takes the common options out of ``arguments``."""
        settings = cls(
            debug=os.environ.get("FINETUNE_DEBUG", "") not in ("", "0"), color=not os.environ.get("NO_COLOR")
        )
        remaining = iter(arguments)
        for argument in remaining:
            if argument == "--":
                settings.launcher_arguments = list(remaining)
            elif argument == "--debug":
                settings.debug = True
            elif argument in ("-q", "--quiet"):
                settings.quiet = True
            elif argument == "--no-color":
                settings.color = False
            else:
                settings.arguments.append(argument)
        return settings

    @property
    def rank(self) -> int:
        """The number of this process among those of a run; the first one talks."""
        return int(os.environ.get("RANK", "0"))

    def console(self) -> Console:
        """Returns where progress goes: stderr, or nowhere."""
        from rich.console import Console

        return Console(file=sys.stderr, quiet=self.quiet or self.rank > 0, no_color=not self.color)
