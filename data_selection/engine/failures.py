"""A row that cannot be measured costs nobody else anything: it gets a reason in place of its measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from finetune.core.errors import FinetuneError
from finetune.data_selection.base import Measured, Unscored
from finetune.data_selection.pool import Example

__all__ = ["FAILURES", "NO_ANSWER", "Isolated", "UnscorableError"]

NO_ANSWER = "the endpoint did not answer"
_FAILED, _NO_MEMORY = "measuring failed", "not enough memory for the row"
FAILURES = frozenset({NO_ANSWER, _FAILED, _NO_MEMORY})
"""Reasons that speak against the program or the machine, not against the row."""


class UnscorableError(Exception):
    """A row that this model or scorer cannot measure, by no fault of the program.

    Args:
        reason: Short, the same for rows with the same fault.
        detail: What is special to this row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class Isolated:
    """Measures batches, and a batch that fails in parts, down to single rows.

    Args:
        measure: Measures a batch.
    """

    def __init__(self, measure: Callable[[Sequence[Example]], list[Measured]]) -> None:
        self._measure = measure
        self._parts = 1
        self._has_succeeded = False

    def __call__(self, batch: Sequence[Example]) -> list[Measured]:
        """Returns what was measured on each row, in order.

        Raises:
            FinetuneError: Something has to be put right by the user.
            Exception: What the first rows failed by, where nothing has been measured yet: that is no fault of theirs.
        """
        size = -(-len(batch) // self._parts)
        return [row for start in range(0, len(batch), size) for row in self._split(batch[start : start + size])]

    def _split(self, batch: Sequence[Example]) -> list[Measured]:
        import torch

        try:
            measured = self._measure(batch)
        except FinetuneError:
            raise  # what the user has to put right is no fault of a row
        except UnscorableError as error:
            if len(batch) == 1:
                return [Unscored(error.reason, error.detail)]
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                return [Unscored(_NO_MEMORY)]
            # Those that follow are as large: they are taken apart at once.
            self._parts *= 2
        except Exception as error:
            if len(batch) == 1:
                if not self._has_succeeded:
                    raise
                return [Unscored(_FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}")]
        else:
            self._has_succeeded = True
            return measured
        half = (len(batch) + 1) // 2
        return [*self._split(batch[:half]), *self._split(batch[half:])]
