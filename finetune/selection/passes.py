"""Something that is measured on every row of a pool, gone on with where it stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from finetune.core.fingerprint import base_fingerprint
from finetune.data_selection.base import Evidence, Measuring, Unscored
from finetune.data_selection.engine.log import ScoreLog
from finetune.data_selection.engine.processes import Processes
from finetune.data_selection.engine.rater import Rater
from finetune.data_selection.engine.run import Work, collect, measure_pool, plan_work
from finetune.data_selection.pool import Example, Pool
from finetune.models.dtype import resolve_device
from finetune.models.load import resolve_dtype
from finetune.selection.folder import SelectionFolder
from finetune.selection.progress import ScoringProgress
from finetune.selection.raters import load_rater

if TYPE_CHECKING:
    from finetune.config.schema import Recipe

__all__ = ["Pass", "identity", "plan_pass", "signals_interrupt"]

_BATCH_TOKENS = {"cpu": 2048, "accelerator": 16384}


@dataclass(frozen=True)
class Pass:
    """One thing that is measured over one pool.

    Attributes:
        measuring: What measures.
        examples: The rows.
        log: Where its measurements are.
        work: What is left.
    """

    measuring: Measuring
    examples: Sequence[Example]
    log: Path
    work: Work

    def measure(self, recipe: Recipe, folder: SelectionFolder, processes: Processes, progress: ScoringProgress) -> None:
        """Measures this process's share of what is left; to be interrupted at any moment."""

        def load(name: str) -> Rater:
            rater = load_rater(recipe, name, folder.dtype() or recipe.model.dtype)
            if processes.rank == 0:
                folder.recognise(name, base_fingerprint(rater.model))
            return rater

        log = ScoreLog(self.log, processes.rank)
        measure_pool(self.measuring, self.examples, self.work, log, load=load, processes=processes, progress=progress)

    def collect(self) -> list[list[Evidence] | Unscored]:
        """Returns what all processes measured on each row."""
        return collect(ScoreLog(self.log), self.work)


def plan_pass(measuring: Measuring, examples: Sequence[Example], log: Path, recipe: Recipe) -> Pass:
    """Returns a pass as the recipe's model and batches make it."""
    model = recipe.model.name_or_path
    work = plan_work(measuring, examples, ScoreLog(log), model=model, batch_tokens=_batch_tokens(recipe))
    return Pass(measuring, examples, log, work)


def identity(recipe: Recipe, measuring: Measuring, pool: Pool, dtype: str | None) -> dict[str, Any]:
    """Returns all that measurements depend on, in the words of the recipe; ``dtype`` None is what the recipe says."""
    model = recipe.model
    device = resolve_device(model.device)
    return {
        "scorer": measuring.fingerprint(),
        "data": pool.fingerprint,
        "model": model.name_or_path,
        "dtype": dtype or str(resolve_dtype(model.dtype, device)).removeprefix("torch."),
        "device": device.type,
        "batch_tokens": _batch_tokens(recipe),
    }


def _batch_tokens(recipe: Recipe) -> int:
    default = _BATCH_TOKENS["cpu" if resolve_device(recipe.model.device).type == "cpu" else "accelerator"]
    return recipe.select.batch_tokens or default


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Makes SIGTERM what Ctrl-C is; whatever was logged by then counts."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread hears signals
        return
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
