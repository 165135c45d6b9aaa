"""What the command prints: results to stdout, errors and warnings to stderr."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

from finetune.core.errors import FinetuneError, FinetuneWarning, Problem

__all__ = ["WarningList", "print_error", "print_json", "print_table", "problem_as_dict"]


def print_json(data: Any) -> None:
    """Prints one JSON document."""
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def print_table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> None:
    """Prints aligned columns; on a terminal a line is cut off where it would wrap."""
    widths = [max(len(row[column]) for row in [headers, *rows]) for column in range(len(headers))]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in [headers, *rows]:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(line[:limit])


def print_error(error: FinetuneError, *, rank: int = 0) -> None:
    """Prints what is wrong to stderr."""
    prefix = f"[rank {rank}] " if rank else ""
    print(f"{prefix}error: {error}", file=sys.stderr, flush=True)


def problem_as_dict(problem: Problem) -> dict[str, str]:
    """Returns the parts of a problem that are not empty."""
    return {name: text for name, text in vars(problem).items() if text}


class WarningList:
    """Shows each warning of ours once when it happens, and all of them again at the end.

    Args:
        others: Whether warnings of libraries are shown; they are for developers.
    """

    def __init__(self, *, others: bool = False) -> None:
        self._show_others = others
        self._texts: dict[str, None] = {}
        self._others = warnings.showwarning

    def install(self) -> None:
        """Takes over how warnings are shown."""
        warnings.showwarning = self._show
        warnings.simplefilter("always", FinetuneWarning)

    def print_again(self) -> None:
        """Prints the numbered list, if there is more than one."""
        if len(self._texts) > 1:
            print("warnings", *(f"{i}) {text}" for i, text in enumerate(self._texts, 1)), sep="\n  ", file=sys.stderr)

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, FinetuneWarning):
            if self._show_others:
                self._others(message, category, filename, lineno, file, line)
        elif str(message) not in self._texts:
            self._texts[str(message)] = None
            print(f"warning: {message}", file=sys.stderr, flush=True)
