"""Selective reflection from a recipe to a file: the teacher writes, the student measures, the better is kept."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.errors import DataError
from finetune.core.files import hash_file, write_json
from finetune.data_selection.base import Evidence, Measuring, RowScorer, Unscored
from finetune.data_selection.chat.config import ChatConfig
from finetune.data_selection.engine.failures import FAILURES
from finetune.data_selection.engine.processes import Processes
from finetune.data_selection.pool import Example, Pool, pool_of
from finetune.data_selection.reflection.choice import ORIGINS, Origin, VersionScores
from finetune.data_selection.reflection.teacher import Reflections, versions
from finetune.data_selection.scorers.ifd import Ifd, IfdConfig
from finetune.data_selection.scorers.r_ifd import ReversedIfd
from finetune.environment import toolkit_version
from finetune.report.say import say
from finetune.selection.describe import describe_bill, next_command
from finetune.selection.folder import SelectionFolder
from finetune.selection.passes import identity, plan_pass, signals_interrupt
from finetune.selection.plan import read_rows
from finetune.selection.progress import ScoringProgress
from finetune.selection.reasons import reasons_in_words, what_helps
from finetune.selection.reflected import RESULT, ReflectedRow, reflected_row, write_reflected
from finetune.selection.reflection_page import write_page
from finetune.selection.result import write_dropped
from finetune.selection.run import FAILED, INTERRUPTED, SelectionResult, has_failed

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from finetune.config.load import LoadedRecipe
    from finetune.config.schema import Recipe

__all__ = ["reflect"]


def reflect(
    loaded: LoadedRecipe,
    *,
    dry_run: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> SelectionResult:
    """Has the recipe's teacher rewrite rows, and writes for each the version that the recipe's model prefers.

    What the teacher wrote and what the student measured is logged, so a run that was killed goes on where it stopped.

    Args:
        loaded: A recipe; ``reflect`` says who the teacher is, ``model`` is the student.
        dry_run: Reads and checks all but the models' weights, asks nobody, and writes nothing.
        resume: Goes on with an earlier reflection in the output directory.
        overwrite: Replaces it.
        console: Where progress goes.

    Raises:
        ConfigError: The teacher cannot be asked.
        DataError: The rows cannot be read, or no version is kept.
        RefusedError: The output directory is taken, or its rows were made in another way.
    """
    folder, processes = SelectionFolder(Path(loaded.recipe.output_dir)), Processes.of_environment()
    folder.check(resume=resume or processes.rank > 0, overwrite=overwrite)
    pool, tokenizer = read_rows(loaded)
    run = _Run(loaded.recipe, folder, processes, pool, tokenizer, console)
    run.teacher.check(pool.examples, tokenizer)
    if dry_run:
        (teacher,) = run.teacher.models(loaded.recipe.model.name_or_path)
        say(console, f"teacher  {teacher}\ndata     {len(pool.examples):,} rows")
        return SelectionResult(folder.path, "planned")
    with folder.alone() if processes.rank == 0 else nullcontext():
        if processes.rank == 0:
            recorded = folder.dtype() if resume and loaded.recipe.model.dtype == "auto" else None
            whole = identity(loaded.recipe, run.teacher, pool, recorded)
            folder.begin(whole, loaded.resolved_yaml(), resume=resume)
        return run.execute()


@dataclass
class _Run:
    """One reflection."""

    recipe: Recipe
    folder: SelectionFolder
    processes: Processes
    pool: Pool
    tokenizer: PreTrainedTokenizerBase
    console: Console | None
    asked_now: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)

    @cached_property
    def teacher(self) -> Reflections:
        """Who rewrites."""
        section = self.recipe.reflect
        who = {name: getattr(section, name) for name in ChatConfig.model_fields}
        return Reflections(ChatConfig(**who), section.max_new_tokens)

    def execute(self) -> SelectionResult:
        """Asks, measures, chooses and writes."""
        try:
            with signals_interrupt():
                reflections = self._measured(self.teacher, self.pool.examples, "teacher")
                found = self._versions(reflections)
                scorers = [scorer(IfdConfig(metric=self.recipe.reflect.metric)) for scorer in (Ifd, ReversedIfd)]
                # A teacher that answers now what failed before changes the versions: then all are measured anew.
                logs = [f"{scorer.name}-{found.fingerprint}" for scorer in scorers]
                measured = [
                    self._measured(scorer, found.examples, log) for scorer, log in zip(scorers, logs, strict=True)
                ]
        except KeyboardInterrupt:
            resume = f"finetune reflect {self.folder.recipe} --resume"
            say(self.console, f"stopped  what was written and scored is kept\ngo on    {resume}")
            return SelectionResult(self.folder.path, "interrupted", INTERRUPTED)
        if self.processes.rank > 0:
            return SelectionResult(self.folder.path, "joined")
        return self._finish(reflections, _scores(found.examples, scorers, measured))

    def _measured(self, measuring: Measuring, examples: Sequence[Example], log: str) -> list[list[Evidence] | Unscored]:
        self.processes.wait()
        one = plan_pass(measuring, examples, self.folder.log / log, self.recipe)
        self.processes.wait()  # all have read what is done before anyone adds to it
        rows, tokens = (left // self.processes.count for left in (one.work.rows_left(), one.work.tokens_left()))
        say(self.console, f"{measuring.name:<9}{one.work.rows_left():,} rows")
        progress = ScoringProgress(self.console, rows, tokens)
        with progress:
            one.measure(self.recipe, self.folder, self.processes, progress)
        self.asked_now += progress.done
        self.seconds += progress.seconds
        self.processes.wait()
        return one.collect()

    def _versions(self, reflections: Sequence[Sequence[Evidence] | Unscored]) -> Pool:
        """Returns all versions of all rows that fit, each with the number of its row and its origin."""
        data = self.recipe.data
        conversations = [
            replace(example.conversation, messages=messages, extra={"row": place, "origin": origin})
            for place, (example, row) in enumerate(zip(self.pool.examples, reflections, strict=True))
            if not isinstance(row, Unscored)
            for origin, messages in versions(example.conversation, row[0]).items()
        ]
        return pool_of(
            conversations,
            self.tokenizer,
            loss_on=data.loss_on,
            max_length=data.max_length,
            truncation=data.truncation,
        )

    def _finish(
        self,
        reflections: Sequence[Sequence[Evidence] | Unscored],
        scores: Mapping[int, Mapping[Origin, VersionScores]],
    ) -> SelectionResult:
        keep = self.recipe.reflect.keep
        rows = [
            reflected_row(example.conversation, found, scores.get(place, {}), keep=keep)
            for place, (example, found) in enumerate(zip(self.pool.examples, reflections, strict=True))
        ]
        if all(row.left_out for row in rows):
            reasons = [(row.left_out, row.detail) for row in rows]
            fix = what_helps(reasons, "another teacher" if keep == "all" else "reflect.keep=all, or another teacher")
            raise DataError("no version is kept", where="reflect", got=reasons_in_words(reasons), fix=fix)
        files = [*write_reflected(rows, self.folder), write_dropped(self.pool, self.folder)]
        manifest = self._manifest(rows, reflections, files)
        write_json(self.folder.manifest, manifest)
        write_page(rows, self.folder, manifest)
        self._say_end(manifest)
        failed = sum(isinstance(row, Unscored) and row.reason in FAILURES for row in reflections)
        return SelectionResult(self.folder.path, "completed", FAILED if has_failed(failed, len(rows)) else 0, manifest)

    def _manifest(
        self,
        rows: Sequence[ReflectedRow],
        reflections: Sequence[Sequence[Evidence] | Unscored],
        files: Sequence[Path],
    ) -> dict[str, Any]:
        return {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "argv": sys.argv,
            "finetune": toolkit_version(),
            "teacher": self.teacher.fingerprint(),
            "student": self.recipe.model.name_or_path,
            "reflect": {"keep": self.recipe.reflect.keep, "metric": self.recipe.reflect.metric},
            "data": {"fingerprint": self.pool.fingerprint},
            "models": self.folder.fingerprints(),
            "counts": {
                "read": len(rows) + len(self.pool.dropped),
                "dropped": dict(Counter(row.reason for row in self.pool.dropped)),
                "left_out": dict(Counter(row.left_out for row in rows if row.left_out)),
                "kept": dict(Counter(row.origin for row in rows if not row.left_out)),
                "reflections": {
                    origin: dict(Counter(row.status[origin] for row in rows if origin in row.status))
                    for origin in ORIGINS[1:]
                },
            },
            "measured_now": self.asked_now,
            "seconds": round(self.seconds, 3),
            "spent": self.teacher.spent(reflections),
            "files": {file.relative_to(self.folder.path).as_posix(): hash_file(file) for file in files},
        }

    def _say_end(self, manifest: Mapping[str, Any]) -> None:
        counts = manifest["counts"]
        for name in ("kept", "left_out"):
            parts = ", ".join(f"{count:,} {what}" for what, count in counts[name].items())
            say(self.console, f"{name.replace('_', ' '):<9}{parts or 'nothing'}")
        say(self.console, describe_bill(manifest["spent"]))
        say(self.console, f"saved    {self.folder.selected / RESULT}  {self.folder.scores}  {self.folder.report}")
        say(self.console, f"next     {next_command(self.folder, manifest)}")


def _scores(
    found: Sequence[Example], scorers: Sequence[RowScorer], measured: Sequence[Sequence[Sequence[Evidence] | Unscored]]
) -> dict[int, dict[Origin, VersionScores]]:
    """Returns the scores of the versions of each row; one that cannot be scored counts as not written."""
    scores: dict[int, dict[Origin, VersionScores]] = {}
    for example, ifd, r_ifd in zip(found, *measured, strict=True):
        if not isinstance(ifd, Unscored) and not isinstance(r_ifd, Unscored):
            values = [one.score(example, *row).value for one, row in zip(scorers, (ifd, r_ifd), strict=True)]
            extra = example.conversation.extra
            scores.setdefault(extra["row"], {})[extra["origin"]] = VersionScores(*values)
    return scores
