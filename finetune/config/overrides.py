"""Keys that are set on the command line: ``a.b=c``, ``--a.b=c``, ``--a.b c``, ``a.b+=c`` and ``~a.b``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from finetune.config.schema import Recipe
from finetune.config.yaml12 import read_yaml, resolve_scalar
from finetune.core.errors import ConfigError, Problem, nearest

__all__ = ["Override", "parse_overrides", "split_arguments"]

_KEY = r"[A-Za-z_][\w-]*(?:\.[\w-]+)*"
_SET = re.compile(rf"(?:--)?({_KEY})(\+?=)(.*)", re.DOTALL)
_OPTION = re.compile(rf"--({_KEY})")
_DELETE = re.compile(rf"~({_KEY})")


@dataclass(frozen=True)
class Override:
    """One key that is set, deleted or added to on the command line.

    Attributes:
        key: Dotted key.
        action: What is done to it.
        value: The new value or item; None for a deletion.
        origin: What it is called in messages.
        text: As it was typed.
    """

    key: str
    action: Literal["set", "append", "delete"]
    value: Any
    origin: str
    text: str


def split_arguments(arguments: Sequence[str], *, flags: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Returns the recipes and the overrides among a verb's arguments; ``--a.b c`` becomes ``a.b=c``.

    Args:
        arguments: What followed the verb, without its own options.
        flags: The verb's own options, one of which may be meant by an option that is no key.

    Raises:
        ConfigError: An option has no value, or is a misspelt option of the verb.
    """
    configs: list[str] = []
    overrides: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if option := _OPTION.fullmatch(argument):
            if _canonical(option[1]) not in Recipe.model_fields and (flag := nearest(argument, flags)):
                raise ConfigError(f"there is no option {argument}", near=flag)
            value = next(remaining, None)
            if value is None or _OPTION.fullmatch(value):
                raise ConfigError(f"option {argument} has no value", fix=f"{option[1]}=VALUE")
            overrides.append(f"{option[1]}={value}")
        elif argument.startswith(("-", "~")) or _SET.fullmatch(argument):
            overrides.append(argument)
        else:
            configs.append(argument)
    return configs, overrides


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Returns the overrides in order.

    Raises:
        ConfigError: Some are not of a known form; all such are reported.
    """
    problems: list[Problem] = []
    overrides = []
    for number, text in enumerate(arguments, 1):
        try:
            overrides.append(_parse(text, f"argument {number}"))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError.of(problems)
    return overrides


def _parse(text: str, origin: str) -> Override:
    if deleted := _DELETE.fullmatch(text):
        return Override(_canonical(deleted[1]), "delete", None, origin, text)
    given = _SET.fullmatch(text)
    if given is None:
        raise ConfigError(
            "this is no override", where=origin, got=text, want="key=value, key+=item, ~key, --key=value or --key value"
        )
    key, sign, value = given.groups()
    return Override(_canonical(key), "set" if sign == "=" else "append", _parse_value(value, origin), origin, text)


def _canonical(key: str) -> str:
    return key.replace("-", "_")


def _parse_value(text: str, origin: str) -> Any:
    """Reads quoted text and flow collections as YAML; anything else is one scalar, whatever signs it holds."""
    return read_yaml(text, origin).data if text.lstrip().startswith(("[", "{", '"', "'")) else resolve_scalar(text)
