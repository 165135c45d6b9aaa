"""Which task the rows of a batch have, where a model tells tasks apart and the caller cannot name each row's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["routed", "use_task"]


@contextmanager
def routed(model: Any, task: str | None = None) -> Iterator[None]:
    """Lets rows be of ``task``, or of any that the model knows; without effect on a model that does not route.

    Raises:
        DataError: The model does not know the task.
    """
    tuner = _tuner(model)
    if tuner is None:
        yield
        return
    before = tuner.task
    tuner.use_task(task if task is not None or before is not None else next(iter(tuner.tasks), None))
    try:
        yield
    finally:
        tuner.use_task(before)


def use_task(model: Any, task: str) -> bool:
    """Lets rows that name no task be of ``task`` from now on, and returns whether the model tells tasks apart."""
    tuner = _tuner(model)
    if tuner is not None:
        tuner.use_task(task)
    return tuner is not None


def _tuner(model: Any) -> Any:
    """Returns the tuner of a PEFT model, if it is one that routes."""
    tuner = getattr(model, "base_model", None)
    return tuner if "use_task" in dir(type(tuner)) else None
