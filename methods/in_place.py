"""Base of the methods that train the base model's own weights and save what they learned in one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from finetune.core.learned_state import read_learned_state, require_same_method, write_learned_state
from finetune.methods.base import Method

__all__ = ["InPlace"]


class InPlace(Method):
    """Writes and reads :meth:`state_dict` in the form of :mod:`finetune.core.learned_state`."""

    def _axes(self) -> Mapping[str, int | None]:
        """Returns the axis that the positions of each tensor count along which is learned in part; None: entries."""
        return {}

    def save(self, folder: str | Path) -> None:
        """Writes what was learned, and the metadata."""
        axes = dict(self._axes())
        shapes = {name: tuple(self.model.get_parameter(name).shape) for name in axes}
        form = {"axes": axes, "shapes": shapes} if axes else {}
        write_learned_state(Path(folder), self.state_dict(), {**self.metadata(), **form})

    def load(self, folder: str | Path) -> None:
        """Reads what :meth:`save` wrote; strict."""
        state, metadata = read_learned_state(Path(folder))
        require_same_method(self.metadata(), metadata, Path(folder))
        self.load_state_dict(state)
