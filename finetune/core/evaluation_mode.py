"""A model in evaluation mode for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["evaluation_mode"]


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts ``model`` into evaluation mode, and back into the mode that it was in."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
