"""One selection from a recipe to a subset: plan, score, choose, write, report."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.errors import FinetuneWarning
from finetune.data_selection.base import Measuring, Unscored
from finetune.data_selection.engine.failures import FAILURES
from finetune.data_selection.engine.processes import Processes
from finetune.data_selection.engine.run import Work
from finetune.data_selection.scorers.k_center import Embeddings
from finetune.report.say import say
from finetune.selection.describe import describe_end, describe_plan
from finetune.selection.folder import SelectionFolder
from finetune.selection.page import write_page
from finetune.selection.passes import Pass, identity, plan_pass, signals_interrupt
from finetune.selection.plan import SelectionPlan, make_plan
from finetune.selection.progress import ScoringProgress
from finetune.selection.result import Selection, select_rows, write_selection

if TYPE_CHECKING:
    from rich.console import Console

    from finetune.config.load import LoadedRecipe

__all__ = ["FAILED", "INTERRUPTED", "SelectionResult", "has_failed", "select"]

FAILED, INTERRUPTED = 1, 130
_FAILURES_ALLOWED = 0.01
"""Share of the rows that may fail to be measured without the run counting as failed."""


@dataclass(frozen=True)
class SelectionResult:
    """What came of a selection.

    Attributes:
        folder: Where it lies.
        status: ``planned`` (dry run), ``completed``, ``interrupted``, or ``joined`` in a process that only measured.
        exit_code: 0, 1 where more than a hundredth of the rows could not be measured, 130 after a signal.
        manifest: The content of ``manifest.json``.
    """

    folder: Path
    status: str
    exit_code: int = 0
    manifest: dict[str, Any] = field(default_factory=dict)


def select(
    loaded: LoadedRecipe,
    *,
    dry_run: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> SelectionResult:
    """Scores the rows of a recipe and writes those that are kept in the form that they came in.

    A row that was measured is not measured again, whatever interrupted the run; other limits choose anew from the
    same measurements.

    Args:
        loaded: A recipe with a ``select`` section.
        dry_run: Reads and checks all but the models' weights, and writes nothing.
        resume: Goes on with an earlier selection in the output directory.
        overwrite: Replaces it.
        console: Where progress goes.

    Raises:
        ConfigError: The recipe says too little.
        DataError: The rows cannot be read or scored, or none is kept.
        RefusedError: The output directory is taken, or its measurements were made in another way.
    """
    folder = SelectionFolder(Path(loaded.recipe.output_dir))
    processes = Processes.of_environment()
    folder.check(resume=resume or processes.rank > 0, overwrite=overwrite)
    plan = make_plan(loaded)
    if dry_run:
        say(console, describe_plan(plan, _passes(plan, folder)[0].work, processes=processes.count))
        return SelectionResult(folder.path, "planned")
    with folder.alone() if processes.rank == 0 else nullcontext():
        return _select(loaded, plan, folder, processes, resume=resume, console=console)


def _select(
    loaded: LoadedRecipe,
    plan: SelectionPlan,
    folder: SelectionFolder,
    processes: Processes,
    *,
    resume: bool,
    console: Console | None,
) -> SelectionResult:
    if processes.rank == 0:
        # What "auto" comes to is measured, so it may differ from run to run: the first one decides.
        recorded = folder.dtype() if resume and plan.recipe.model.dtype == "auto" else None
        folder.begin(identity(plan.recipe, plan.scorer, plan.pool, recorded), loaded.resolved_yaml(), resume=resume)
    processes.wait()
    passes = _passes(plan, folder)
    say(console, describe_plan(plan, passes[0].work, processes=processes.count))
    processes.wait()  # all have read what is done before anyone adds to it
    rows, tokens = (sum(count(one.work) for one in passes) for count in (Work.rows_left, Work.tokens_left))
    progress = ScoringProgress(console, rows // processes.count, tokens // processes.count)
    try:
        with signals_interrupt(), progress:
            for one in passes:
                one.measure(plan.recipe, folder, processes, progress)
    except KeyboardInterrupt:
        say(console, f"stopped  {progress.done:,} more rows are scored\ngo on    {_resume_command(folder)}")
        return SelectionResult(folder.path, "interrupted", INTERRUPTED)
    processes.wait()
    if processes.rank > 0:
        return SelectionResult(folder.path, "joined")
    measured, *vectors = (one.collect() for one in passes)
    selection = select_rows(plan, measured, *vectors)
    return _finish(selection, folder, progress, console)


def _passes(plan: SelectionPlan, folder: SelectionFolder) -> list[Pass]:
    """Returns what is measured on every row: what the scorer needs, and what rules that compare rows need."""
    measured: list[tuple[Measuring, Path]] = [(plan.scorer, folder.log)]
    measured += [(Embeddings(), folder.vectors)] if plan.recipe.select.diversity is not None else []
    return [plan_pass(one, plan.pool.examples, log, plan.recipe) for one, log in measured]


def _finish(
    selection: Selection, folder: SelectionFolder, progress: ScoringProgress, console: Console | None
) -> SelectionResult:
    evidence = [row for row in selection.measured if not isinstance(row, Unscored)]
    notes = selection.plan.scorer.diagnose(evidence)
    for note in notes:
        warnings.warn(note, FinetuneWarning, stacklevel=2)
    about = {
        "models": folder.fingerprints(),
        "measured_now": progress.done,
        "seconds": round(progress.seconds, 3),
        "rows_per_second": round(progress.done / progress.seconds, 3) if progress.done else None,
        "warnings": notes,
    }
    manifest = write_selection(selection, folder, about=about)
    write_page(selection, folder, manifest)
    say(console, describe_end(selection, folder, manifest))
    failed = sum(row.reason in FAILURES for row in selection.unscored.values())
    code = FAILED if has_failed(failed, len(selection.examples)) else 0
    return SelectionResult(folder.path, "completed", code, manifest)


def has_failed(failed: int, rows: int) -> bool:
    """Returns whether so many rows failed to be measured that the run counts as failed."""
    return failed > _FAILURES_ALLOWED * rows


def _resume_command(folder: SelectionFolder) -> str:
    return f"finetune select {folder.recipe} --resume"
