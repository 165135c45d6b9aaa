"""Base of the methods that train the base model's own weights and save what they learned in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.core.learned_state import FOLLOWERS, read_learned_state, require_same_method, write_learned_state
from finetune.methods.base import Method

__all__ = ["InPlace"]


class InPlace(Method):
    """Writes and reads :meth:`state_dict` in the form of :mod:`finetune.core.learned_state`."""

    def _axes(self) -> Mapping[str, int | None]:
        """Returns the axis that the positions of each tensor count along which is learned in part; None: entries."""
        return {}

    def save(self, folder: str | Path, *, followers: Sequence[Method] = ()) -> None:
        """Writes what was learned, and the metadata.

        Args:
            folder: Where to.
            followers: Methods of a composition that train what this one chose: what they need besides goes to the same
                file.
        """
        axes = dict(self._axes())
        shapes = {name: tuple(self.model.get_parameter(name).shape) for name in axes}
        form: dict[str, Any] = {"axes": axes, "shapes": shapes} if axes else {}
        if followers:
            form[FOLLOWERS] = _settings(followers)
        state = {key: tensor for method in (self, *followers) for key, tensor in method.state_dict().items()}
        write_learned_state(Path(folder), state, {**self.metadata(), **form})

    def load(self, folder: str | Path, *, followers: Sequence[Method] = ()) -> None:
        """Reads what :meth:`save` wrote; strict."""
        state, metadata = read_learned_state(Path(folder))
        own = {**self.metadata(), FOLLOWERS: _settings(followers)}
        require_same_method(own, {FOLLOWERS: [], **metadata}, Path(folder))
        for method in (self, *followers):
            method.load_state_dict(state)


def _settings(methods: Sequence[Method]) -> list[dict[str, Any]]:
    return [{"name": method.name, **method.config.model_dump(mode="json")} for method in methods]
