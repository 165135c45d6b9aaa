"""Lists of unfrozen parameters as other trainers take them, and ranges of rows at the end of a pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from finetune.core.errors import ConfigError, TargetError

__all__ = ["RowRange", "match_unfrozen", "read_unfrozen", "rows_of", "split_rows"]

RowRange = tuple[int | None, int | None]
"""First row and the one after the last, negative ones from the end; None is the end on that side."""

_ROWS = re.compile(r"(.*?)\[(-?\d*):(-?\d*)\]")
_WRAPPER = "language_model."
"""What models of text and images put before the names of their text model's parameters."""


def split_rows(pattern: str) -> tuple[str, RowRange | None]:
    """Returns a pattern without the ``[a:b]`` at its end, and the range."""
    match = _ROWS.fullmatch(pattern)
    if match is None:
        return pattern, None
    first, stop = (int(end) if end not in ("", "-") else None for end in match.groups()[1:])
    return match[1], (first, stop)


def rows_of(span: RowRange, name: str, rows: int, where: str) -> range:
    """Returns the rows that a range means.

    Raises:
        TargetError: The parameter has not such rows.
    """
    first, stop = (
        default if end is None else end + rows if end < 0 else end for end, default in zip(span, (0, rows), strict=True)
    )
    if not 0 <= first < stop <= rows:
        raise TargetError(f"{name} has rows 0 to {rows - 1}", where=where, got=f"[{first}:{stop}]")
    return range(first, stop)


def read_unfrozen(path: str) -> list[str]:
    """Returns the entries of the list ``unfrozen_parameters`` of a YAML file.

    Raises:
        ConfigError: The file is missing, or holds no such list.
    """
    try:
        content = YAML(typ="safe", pure=True).load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("the list cannot be read", where=path, got=str(error.strerror)) from error
    except YAMLError as error:
        raise ConfigError("the list is not valid YAML", where=path, got=" ".join(str(error).split())) from error
    entries = content.get("unfrozen_parameters") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(
            "the file holds no list of unfrozen parameters",
            where=path,
            want="unfrozen_parameters: followed by - NAME lines, as finetune scan writes it",
        )
    return entries


def match_unfrozen(
    entries: Sequence[str], aliases: Mapping[str, Sequence[str]], where: str
) -> dict[str, tuple[tuple[str, ...], RowRange | None]]:
    """Returns by entry the parameters that it means, and which rows of them.

    An entry is a regular expression that a name has to begin with, in which a dot is a dot unless ``+`` follows; rows
    may follow its ``$``. A list of which an entry matches nothing is tried with the prefix of a wrapped text model left
    out or put in.

    Args:
        entries: The list.
        aliases: Parameter -> all its names: a shared one has several.
        where: The file, for messages.

    Raises:
        ConfigError: An entry is no regular expression.
        TargetError: An entry matches no parameter.
    """
    found = _match(entries, aliases, where)
    if not all(names for names, _ in found.values()):
        plain = {name: [alias.replace(_WRAPPER, "") for alias in own] for name, own in aliases.items()}
        wrapped = {
            name: [alias.replace("model.", f"model.{_WRAPPER}", 1) for alias in own] for name, own in aliases.items()
        }
        for other in (plain, wrapped):
            retried = _match(entries, other, where)
            if all(names for names, _ in retried.values()):
                return retried
    missing = [entry for entry, (names, _) in found.items() if not names]
    if missing:
        raise TargetError(
            f"{len(missing)} of {len(found)} entries match no parameter that may train",
            where=where,
            got=", ".join(missing[:4]),
            want="names as `model.named_parameters()` has them",
        )
    return found


def _match(
    entries: Sequence[str], aliases: Mapping[str, Sequence[str]], where: str
) -> dict[str, tuple[tuple[str, ...], RowRange | None]]:
    found: dict[str, tuple[tuple[str, ...], RowRange | None]] = {}
    for entry in entries:
        pattern, rows = split_rows(entry)
        try:
            expression = re.compile(re.sub(r"\.(?!\+)", r"\\.", pattern))
        except re.error as error:
            raise ConfigError("not a regular expression", where=where, got=entry, want=str(error)) from error
        names = tuple(name for name, own in aliases.items() if any(expression.match(alias) for alias in own))
        found[entry] = (names, rows)
    return found
