"""What goes wrong, said in one form: what, where, got, want, near, fix.

Library code raises these exceptions; only the command line turns them into text and exit codes.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "CapabilityError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "FinetuneError",
    "FinetuneWarning",
    "Problem",
    "RefusedError",
    "RegistryError",
    "TargetError",
    "TrainingError",
    "list_choices",
    "nearest",
]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; every part but ``what`` may be empty and is then left out.

    Attributes:
        what: What is wrong, in one clause.
        where: ``file:line  key``, a path, a module name.
        got: The offending value as the user wrote it.
        want: What would be accepted.
        near: The nearest valid name, as ``'qkv' -> 'q_proj'`` or just the name.
        fix: One concrete thing to type.
    """

    what: str
    where: str = ""
    got: str = ""
    want: str = ""
    near: str = ""
    fix: str = ""

    def __str__(self) -> str:
        parts = [("at", self.where), ("got", self.got), ("want", self.want), ("near", self.near), ("fix", self.fix)]
        return "\n".join([self.what, *(f"  {label:<4} {text}" for label, text in parts if text)])


class FinetuneError(Exception):
    """Base of every error that a user can act on.

    Args:
        what: What is wrong, in one clause.
        where: See :class:`Problem`, as for the remaining parts.

    Attributes:
        problems: All problems of the phase that failed; the first gives the parts of this error.
        exit_code: What the command line exits with.
    """

    exit_code: ClassVar[int] = 2

    def __init__(
        self, what: str, *, where: str = "", got: str = "", want: str = "", near: str = "", fix: str = ""
    ) -> None:
        super().__init__(what)
        self.problems: tuple[Problem, ...] = (Problem(what, where, got, want, near, fix),)

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> FinetuneError:
        """Returns one error that reports all ``problems`` (at least one)."""
        error = cls(problems[0].what)
        error.problems = tuple(problems)
        return error

    @property
    def what(self) -> str:
        """What is wrong, in one clause."""
        return self.problems[0].what

    @property
    def where(self) -> str:
        """Where: file, line, key, module."""
        return self.problems[0].where

    @property
    def got(self) -> str:
        """The offending value."""
        return self.problems[0].got

    @property
    def want(self) -> str:
        """What would be accepted."""
        return self.problems[0].want

    @property
    def near(self) -> str:
        """The nearest valid name."""
        return self.problems[0].near

    @property
    def fix(self) -> str:
        """One concrete thing to type."""
        return self.problems[0].fix

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        numbered = [f"{number}) {problem}" for number, problem in enumerate(self.problems, 1)]
        return "\n".join([*numbered, f"{len(self.problems)} problems; nothing was started."])


class ConfigError(FinetuneError):
    """A recipe, an override or a combination of keys is wrong."""


class RegistryError(FinetuneError):
    """A method, scorer, recipe or template name is unknown, or registered twice."""


class TargetError(FinetuneError):
    """A pattern matched no module, or a module that the method cannot train."""


class DataError(FinetuneError):
    """A data file, a row, a template or a loss mask is unusable."""


class CheckpointError(FinetuneError):
    """A checkpoint or a learned state is missing, damaged, or belongs to another run."""


class CapabilityError(FinetuneError):
    """The method does not support the feature asked for."""


class RefusedError(FinetuneError):
    """Going on would overwrite something or cannot fit; nothing was touched."""

    exit_code = 3


class TrainingError(FinetuneError):
    """The run cannot train, or stopped training: nothing trainable, non-finite loss, silent no-op."""

    exit_code = 1


class FinetuneWarning(UserWarning):
    """A warning that names its consequence."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Returns the choice closest to ``word`` (difflib, cutoff 0.6); of equals, that which begins alike; or nothing."""
    matches = difflib.get_close_matches(word, list(choices), n=5, cutoff=0.6)
    return max(matches, key=lambda match: _likeness(word, match), default="")


def _likeness(word: str, choice: str) -> tuple[float, int]:
    pairs = zip(word, choice, strict=False)
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return difflib.SequenceMatcher(None, choice, word).ratio(), alike


def list_choices(choices: Iterable[str], *, more: str = "", limit: int = 12) -> str:
    """Returns at most ``limit`` choices in order, then how many more there are and the command that lists them."""
    names = list(choices)
    shown = ", ".join(names[:limit])
    if len(names) <= limit:
        return shown
    rest = f"and {len(names) - limit} more"
    return f"{shown} {rest}; {more} lists them" if more else f"{shown} {rest}"
