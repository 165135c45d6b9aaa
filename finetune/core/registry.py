"""A table from names to things, filled by decorators and asked by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from finetune.core.errors import RegistryError, list_choices, nearest

__all__ = ["Registry", "canonical_name"]

T = TypeVar("T")


def canonical_name(name: str) -> str:
    """Returns the registry's spelling: lower case, an underscore for a dash."""
    return name.strip().lower().replace("-", "_")


class Registry(Generic[T]):
    """Named entries of one kind.

    Args:
        kind: What an entry is called in messages, for example ``method``.
        listing: The command that lists all entries, for example ``finetune ls methods``.
    """

    def __init__(self, kind: str, listing: str) -> None:
        self.kind = kind
        self.listing = listing
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Returns a decorator that enters its argument under ``name``.

        Raises:
            RegistryError: The name is not canonical, or another entry has it.
        """
        if name != canonical_name(name):
            raise RegistryError(f"{self.kind} name {name!r} is not canonical", fix=canonical_name(name))

        def enter(entry: T) -> T:
            if name in self._entries:
                raise RegistryError(f"{self.kind} {name!r} is registered twice", got=repr(entry))
            self._entries[name] = entry
            return entry

        return enter

    def get(self, name: str, *, where: str = "") -> T:
        """Returns the entry called ``name`` (a dash counts as an underscore).

        Raises:
            RegistryError: There is none; the error names the nearest one and lists the choices.
        """
        entry = self._entries.get(canonical_name(name))
        if entry is None:
            raise RegistryError(
                f"unknown {self.kind} {name!r}",
                where=where,
                want=list_choices(sorted(self._entries), more=self.listing),
                near=nearest(canonical_name(name), self._entries),
            )
        return entry

    def __contains__(self, name: str) -> bool:
        return canonical_name(name) in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)
