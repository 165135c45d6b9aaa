"""Measures a pool: model by model, batch by batch, each exactly once over all runs and processes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finetune.data_selection.base import Evidence, Load, Measured, Measuring, Unscored
from finetune.data_selection.engine.batches import plan_batches
from finetune.data_selection.engine.failures import FAILURES, Isolated
from finetune.data_selection.engine.log import ScoreLog
from finetune.data_selection.engine.processes import Processes
from finetune.data_selection.pool import Example

__all__ = ["Progress", "Work", "collect", "measure_pool", "plan_work"]

Progress = Callable[[int, int], object]
"""Called with the rows and the tokens of a batch that was just measured."""


@dataclass(frozen=True)
class Work:
    """What there is to measure.

    Attributes:
        models: The models, in order.
        batches: Positions of rows.
        done: (Number of the model, number of the batch) of what the log holds.
        lengths: Tokens of each row.
    """

    models: Sequence[str]
    batches: Sequence[Sequence[int]]
    done: frozenset[tuple[int, int]]
    lengths: Sequence[int]

    @property
    def left(self) -> list[tuple[int, int]]:
        """(Number of the model, number of the batch) of what is still to be measured."""
        every = ((model, batch) for model in range(len(self.models)) for batch in range(len(self.batches)))
        return [pair for pair in every if pair not in self.done]

    def rows_left(self) -> int:
        """How many rows are still to be measured, each once per model."""
        return sum(len(self.batches[batch]) for _, batch in self.left)

    def tokens_left(self) -> int:
        """Their tokens."""
        return sum(self.lengths[position] for _, batch in self.left for position in self.batches[batch])


def plan_work(measuring: Measuring, pool: Sequence[Example], log: ScoreLog, *, model: str, batch_tokens: int) -> Work:
    """Returns what is to be measured, given what the log holds; batches in which a row failed are tried again.

    Args:
        measuring: What measures.
        pool: The rows.
        log: What was measured before.
        model: The recipe's model.
        batch_tokens: Rows times tokens of the longest one of a batch, at most.
    """
    lengths = [example.tokens for example in pool]
    done = {
        batch
        for batch, rows in log.read().items()
        if not any(isinstance(row, Unscored) and row.reason in FAILURES for row in rows.values())
    }
    return Work(measuring.models(model), plan_batches(lengths, batch_tokens), frozenset(done), lengths)


def measure_pool(
    measuring: Measuring,
    pool: Sequence[Example],
    work: Work,
    log: ScoreLog,
    *,
    load: Load,
    processes: Processes | None = None,
    progress: Progress = lambda rows, tokens: None,
) -> None:
    """Measures what is left and logs every batch; to be interrupted at any moment.

    Args:
        measuring: What measures.
        pool: The rows.
        work: What :func:`plan_work` returned.
        log: Where measurements go.
        load: Loads a model by its name.
        processes: This process among those that share the work; None is the only one.
        progress: Called after each batch of this process.
    """
    processes = processes or Processes()
    for number, name in enumerate(work.models):
        mine = processes.share([batch for model, batch in work.left if model == number])
        if not mine:
            continue
        measure = Isolated(measuring.measurer(number, name, load, pool))
        for batch in mine:
            positions = work.batches[batch]
            measured = measure([pool[position] for position in positions])
            log.append(number, batch, dict(zip(positions, measured, strict=True)))
            progress(len(positions), sum(work.lengths[position] for position in positions))
        # Two raters rarely fit at a time.
        del measure
        gc.collect()


def collect(log: ScoreLog, work: Work) -> list[list[Evidence] | Unscored]:
    """Returns for each row of the pool what was measured on it, one entry per model, or why it has no score.

    Raises:
        RuntimeError: The log does not hold every row.
    """
    batches = log.read()
    by_row: list[list[Measured]] = [[] for _ in work.lengths]
    for model in range(len(work.models)):
        for batch, positions in enumerate(work.batches):
            rows = batches.get((model, batch), {})
            if set(rows) != set(positions):
                raise RuntimeError(f"the log has {len(rows)} of {len(positions)} rows of batch {batch}, model {model}")
            for position in positions:
                by_row[position].append(rows[position])
    return [_whole(row) for row in by_row]


def _whole(row: Sequence[Measured]) -> list[Evidence] | Unscored:
    failed = next((one for one in row if isinstance(one, Unscored)), None)
    return failed if failed is not None else [one for one in row if not isinstance(one, Unscored)]
