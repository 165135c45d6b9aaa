"""How far the scoring is: one bar on a terminal, now and then one line elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from finetune.report.figures import seconds_in_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["ScoringProgress"]

_SECONDS_BETWEEN_LINES = 10


class ScoringProgress:
    """Shows rows, rows per second and the time that is left, which goes by tokens: long rows come first.

    Args:
        console: Where to; None is nowhere.
        rows: Rows that this process will measure.
        tokens: Their tokens.

    Attributes:
        seconds: Time since the start.
        done: Rows that were measured.
    """

    def __init__(self, console: Console | None, rows: int, tokens: int) -> None:
        self._console, self._rows, self._tokens = console, rows, tokens
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started = self._said = time.perf_counter()
        self._tokens_done = 0
        self.done = 0

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self._started

    def __enter__(self) -> ScoringProgress:
        self._started = self._said = time.perf_counter()
        if self._console is not None and self._console.is_terminal and self._rows:
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("score"), BarColumn(), TextColumn("{task.fields[numbers]}"), console=self._console
            )
            self._bar.start()
            self._task = self._bar.add_task("score", total=self._tokens, numbers="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, rows: int, tokens: int) -> None:
        """Moves on by one batch."""
        self.done += rows
        self._tokens_done += tokens
        left = self.seconds * (self._tokens - self._tokens_done) / max(1, self._tokens_done)
        numbers = f"{self.done:,}/{self._rows:,} rows  {self.done / self.seconds:.1f} rows/s"
        if self._bar is not None and self._task is not None:
            numbers += f"  {seconds_in_words(left)} left"
            self._bar.update(self._task, completed=self._tokens_done, numbers=numbers)
        elif self._console is not None and time.perf_counter() - self._said > _SECONDS_BETWEEN_LINES:
            self._said = time.perf_counter()
            line = f"rows={self.done}/{self._rows} rows_per_s={self.done / self.seconds:.1f} left_s={left:.0f}"
            self._console.print(line, highlight=False, soft_wrap=True)
