"""All rows of a recipe's sources as conversations, and the rows that cannot be used."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from finetune.core.errors import ConfigError, DataError, Problem, list_choices, nearest
from finetune.data.files import read_rows
from finetune.data.formats import COLUMNS, convert, detect
from finetune.data.jsonlines import BadRowError
from finetune.data.records import Conversation, DataSource, Dropped, Message
from finetune.data.task_template import TaskTemplate

__all__ = ["load_conversations"]

_REPORTED = 20


def load_conversations(
    sources: Sequence[DataSource],
    *,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    system: str | None = None,
    template: TaskTemplate | None = None,
    on_error: Literal["fail", "skip"] = "fail",
    seed: int = 42,
) -> tuple[list[Conversation], list[Dropped]]:
    """Reads, converts and mixes.

    Args:
        sources: Where the rows come from; a weight of 0.5 takes half of a source's rows at random, 2 takes all twice.
        format: Form of the rows of sources that name none; ``auto`` goes by the columns of each row.
        columns: Our column name -> the data's, where they differ.
        system: System message of conversations that have none.
        template: Puts rows of a labelled data set into words, before all else but ``columns``.
        on_error: Whether an unusable row ends the run or is counted and left out.
        seed: Seed of the mixture.

    Returns:
        The usable rows, in the order of the sources, and the others.

    Raises:
        DataError: A source cannot be read, a row is unusable and ``on_error`` is ``fail`` (the first 20 are reported
            together), or no row is usable.
        ConfigError: The format is unknown.
    """
    conversations, dropped = [], []
    for source in sources:
        own_columns = source.columns if source.columns is not None else columns
        rows, bad = _read(source, source.format or format, own_columns or {}, system, template)
        if bad and on_error == "fail":
            raise DataError.of([_problem(row, len(bad)) for row in bad[:_REPORTED]])
        if not rows:
            reasons = sorted({row.reason for row in bad})
            raise DataError("no row of the data can be used", where=source.path, got="; ".join(reasons) or "no rows")
        # By the file's name: a path may be written in several ways, and a run's copy of the recipe has it absolute.
        conversations += _weighted(rows, source.weight, random.Random(f"{seed} {Path(source.path).name}"))
        dropped += bad
    return conversations, dropped


def _read(
    source: DataSource,
    format_name: str,
    columns: Mapping[str, str],
    system: str | None,
    template: TaskTemplate | None,
) -> tuple[list[Conversation], list[Dropped]]:
    if format_name not in ("auto", *COLUMNS):
        raise ConfigError(
            f"unknown data format {format_name!r}",
            where="data.format",
            want=list_choices(("auto", *COLUMNS)),
            near=nearest(format_name, COLUMNS),
        )
    theirs = {theirs: ours for ours, theirs in columns.items()}
    good, bad = [], []
    for number, (line, row) in enumerate(read_rows(source)):
        try:
            if isinstance(row, BadRowError):
                raise row
            named = {theirs.get(name, name): value for name, value in row.items()}
            if template is not None:
                named = template.words(named)
            row_of = _conversation(named, format_name, system, number, source.path, line)
            good.append(replace(row_of, task=row_of.own_task or source.task or Path(source.path).stem))
        except BadRowError as reason:
            bad.append(Dropped(source.path, line, str(number), reason.reason, reason.detail))
    return good, bad


def _conversation(
    row: dict[str, Any], format_name: str, system: str | None, number: int, source: str, line: int | None
) -> Conversation:
    found = detect(row) if format_name == "auto" else format_name
    if found is None:
        wanted = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in COLUMNS.items())
        raise BadRowError("the columns fit no format", f"{', '.join(row)} (formats: {wanted})")
    (messages, text), extra = convert(row, found)
    if system is not None and messages and messages[0].role != "system":
        messages = (Message("system", system), *messages)
    return Conversation(
        messages,
        str(extra.get("id", number)),
        source,
        line,
        extra,
        text=text,
        tools=_tools(extra.get("tools")),
        number=number,
    )


def _tools(value: Any) -> tuple[Any, ...]:
    if not value:
        return ()
    try:
        return tuple(json.loads(value)) if isinstance(value, str) else tuple(value)
    except (ValueError, TypeError) as error:
        raise BadRowError("tools is not a JSON list", repr(value)[:60]) from error


def _weighted(rows: list[Conversation], weight: float, generator: random.Random) -> list[Conversation]:
    times, rest = divmod(round(weight * len(rows)), len(rows))
    chosen = sorted(generator.sample(range(len(rows)), rest))
    return rows * times + [rows[position] for position in chosen]


def _problem(row: Dropped, total: int) -> Problem:
    where = f"{row.source}:{row.line}" if row.line is not None else f"{row.source} row {row.id}"
    fix = f"data.on_error: skip leaves all {total} unusable rows out and counts them"
    return Problem(row.reason, where, got=row.detail, fix=fix)
