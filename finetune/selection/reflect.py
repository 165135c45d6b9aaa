"""Selective reflection from a recipe to a file: the teacher writes, the student measures, the better is kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.errors import DataError
from finetune.core.files import hash_file, replaced_file, write_json, write_text
from finetune.data.records import Message
from finetune.data_selection.base import Evidence, Measuring, RowScorer, Unscored
from finetune.data_selection.chat.config import ChatConfig
from finetune.data_selection.engine.failures import FAILURES
from finetune.data_selection.engine.processes import Processes
from finetune.data_selection.pool import Example, Pool, pool_of
from finetune.data_selection.reflection.choice import ORIGINS, Origin, VersionScores, excluded, preferred
from finetune.data_selection.reflection.teacher import Reflections, versions
from finetune.data_selection.scorers.ifd import Ifd, IfdConfig
from finetune.data_selection.scorers.r_ifd import ReversedIfd
from finetune.environment import toolkit_version
from finetune.report.say import say
from finetune.selection.describe import describe_bill
from finetune.selection.folder import SelectionFolder
from finetune.selection.passes import identity, plan_pass, signals_interrupt
from finetune.selection.plan import read_rows
from finetune.selection.progress import ScoringProgress
from finetune.selection.run import FAILED, INTERRUPTED, SelectionResult, has_failed

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from finetune.config.load import LoadedRecipe
    from finetune.config.schema import Recipe

__all__ = ["reflect"]

_RESULT = "reflected.jsonl"


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
        rows = [self._row(place, row, scores.get(place, {})) for place, row in enumerate(reflections)]
        kept = [row for row in rows if not row["left_out"]]
        if not kept:
            reasons = Counter(row["left_out"] for row in rows)
            got = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            raise DataError("no version is kept", where="reflect", got=got, fix="reflect.keep=all, or another teacher")
        self._write_rows(rows)
        manifest = self._manifest(rows, reflections)
        write_json(self.folder.manifest, manifest)
        self._say_end(manifest)
        failed = sum(isinstance(row, Unscored) and row.reason in FAILURES for row in reflections)
        return SelectionResult(self.folder.path, "completed", FAILED if has_failed(failed, len(rows)) else 0, manifest)

    def _row(
        self, place: int, row: Sequence[Evidence] | Unscored, scores: Mapping[Origin, VersionScores]
    ) -> dict[str, Any]:
        """Returns what the table says of a row, and the messages of its preferred version."""
        conversation = self.pool.examples[place].conversation
        found: dict[str, Any] = {
            "row": conversation.number,
            "id": conversation.id,
            "source": conversation.source,
            "line": conversation.line,
            "origin": None,
            "left_out": "",
            "detail": "",
            "messages": (),
        }
        for origin in ORIGINS:
            one = scores.get(origin)
            found |= {f"ifd_{origin}": one and one.ifd, f"r_ifd_{origin}": one and one.r_ifd}
        if isinstance(row, Unscored):
            return {**found, "left_out": row.reason, "detail": row.detail}
        found |= {f"status_{origin}": row[0]["status"].get(origin, "") for origin in ORIGINS[1:]}
        if "original" not in scores:
            return {**found, "left_out": "the original has no score"}
        origin = preferred(scores)
        reason = excluded(origin, scores[origin], keep=self.recipe.reflect.keep)
        return {**found, "origin": origin, "left_out": reason, "messages": versions(conversation, row[0])[origin]}

    def _write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        import pyarrow
        import pyarrow.parquet

        lines = [json.dumps(_line(row), ensure_ascii=False) + "\n" for row in rows if not row["left_out"]]
        self.folder.selected.mkdir(parents=True, exist_ok=True)
        write_text(self.folder.selected / _RESULT, "".join(lines))
        names = dict.fromkeys(name for row in rows for name in row if name != "messages")
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        with replaced_file(self.folder.scores) as beside:
            pyarrow.parquet.write_table(table, beside)

    def _manifest(
        self, rows: Sequence[Mapping[str, Any]], reflections: Sequence[Sequence[Evidence] | Unscored]
    ) -> dict[str, Any]:
        status: dict[str, Counter[str]] = {origin: Counter() for origin in ORIGINS[1:]}
        for row in rows:
            for origin, counts in status.items():
                counts.update([row[f"status_{origin}"]] if row.get(f"status_{origin}") else [])
        files = [self.folder.selected / _RESULT, self.folder.scores]
        return {
            "finetune": toolkit_version(),
            "teacher": self.teacher.fingerprint(),
            "student": self.recipe.model.name_or_path,
            "reflect": {"keep": self.recipe.reflect.keep, "metric": self.recipe.reflect.metric},
            "data": {"fingerprint": self.pool.fingerprint},
            "models": self.folder.fingerprints(),
            "counts": {
                "read": len(rows) + len(self.pool.dropped),
                "dropped": dict(Counter(row.reason for row in self.pool.dropped)),
                "left_out": dict(Counter(row["left_out"] for row in rows if row["left_out"])),
                "kept": dict(Counter(row["origin"] for row in rows if not row["left_out"])),
                "reflections": {origin: dict(counts) for origin, counts in status.items()},
            },
            "measured_now": self.asked_now,
            "spent": self.teacher.spent(reflections),
            "files": {file.relative_to(self.folder.path).as_posix(): hash_file(file) for file in files},
        }

    def _say_end(self, manifest: Mapping[str, Any]) -> None:
        counts = manifest["counts"]
        for name in ("kept", "left_out"):
            parts = ", ".join(f"{count:,} {what}" for what, count in counts[name].items())
            say(self.console, f"{name.replace('_', ' '):<9}{parts or 'nothing'}")
        result = self.folder.selected / _RESULT
        say(self.console, describe_bill(manifest["spent"]))
        say(self.console, f"saved    {result}  {self.folder.scores}")
        say(
            self.console,
            f"next     finetune train {self.folder.recipe} data.train={result} output_dir={self.folder.path}-tuned",
        )


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


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    messages: Sequence[Message] = row["messages"]
    said = [{"role": message.role, "content": message.content} for message in messages]
    about = {name: row[name] for name in ("origin", "id", "source", "line")}
    scores = {name: row[f"{name}_{row['origin']}"] for name in ("ifd", "r_ifd")}
    return {"messages": said, **about, **scores}
