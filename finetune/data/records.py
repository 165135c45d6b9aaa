"""What a row is, whatever form it came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Conversation", "DataSource", "Dropped", "Message"]


class DataSource(Protocol):
    """One place that rows come from; see the recipe's ``data.train``."""

    @property
    def path(self) -> str:
        """File, ``datasets`` folder, hub name, or ``shipped:NAME``."""

    @property
    def split(self) -> str | None:
        """Split of a hub name or folder; None is ``train``."""

    @property
    def weight(self) -> float:
        """Rows taken, in multiples of the source's size."""

    @property
    def format(self) -> str | None:
        """Form of the rows; None is the caller's default."""

    @property
    def subset(self) -> str | None:
        """Configuration name of a hub data set."""

    @property
    def columns(self) -> Mapping[str, str] | None:
        """Our column name -> the source's; None is the caller's."""

    @property
    def task(self) -> str | None:
        """Task of the rows that name none; None is the name of the file."""


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        content: The text.
    """

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """One row: messages, or plain text where there are none.

    Attributes:
        messages: The turns; empty for plain text.
        id: The row's own id, or its number in the source, counted from 0.
        source: The path or name that the row came from.
        line: Line in the file, counted from 1; None where the source has no lines.
        extra: Columns that are not part of the conversation.
        text: Plain text.
        tools: Descriptions of the tools that the assistant may call.
        task: What the row is about, for methods that tell tasks apart.
        number: Position in the source, counted from 0.
    """

    messages: tuple[Message, ...]
    id: str
    source: str
    line: int | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    tools: tuple[Any, ...] = ()
    task: str = ""
    number: int = 0

    @property
    def own_task(self) -> str:
        """What the row's own column ``task`` says; empty where it says nothing."""
        named = self.extra.get("task")
        return "" if named is None else str(named)

    @property
    def where(self) -> str:
        """``file:line``, or the source and the row's id."""
        return f"{self.source}:{self.line}" if self.line is not None else f"{self.source} row {self.id}"


@dataclass(frozen=True)
class Dropped:
    """A row that is not used, and why.

    Attributes:
        source: The path or name that the row came from.
        line: Line in the file, counted from 1, or None.
        id: The row's id.
        reason: A short reason that rows share, to count by.
        detail: What is special to this row.
    """

    source: str
    line: int | None
    id: str
    reason: str
    detail: str = ""
