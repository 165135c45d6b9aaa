"""Searches for the modules to train: one training run of a recipe per candidate, measured on tasks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.load import LoadedRecipe, load_recipe
from finetune.core.errors import CapabilityError, ConfigError, RefusedError
from finetune.core.files import write_json, write_text
from finetune.evaluation.run import evaluate_tasks
from finetune.evaluation.tasks import LM_EVAL, load_rows, read_task
from finetune.report.say import say
from finetune.search.percent import percent
from finetune.search.tree import Found, Node, Scores, search_tree
from finetune.training.output_folder import RECORD
from finetune.training.plan import make_plan
from finetune.training.run import INTERRUPTED, train

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["SearchResult", "search"]

_CHECKED_ROWS = 32

MARK, LOG, RECIPE, BASE = "search.json", "search.jsonl", "search.yaml", "base.json"


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        folder: Where it lies: a log, and the run of each candidate.
        base: What the untouched model reaches.
        tried: All candidates, in the order in which they were tried.
        ended: ``complete``, ``budget spent`` or ``interrupted``.
    """

    folder: Path
    base: Scores
    tried: list[Found]
    ended: str

    @property
    def best(self) -> Found | None:
        """The candidate of highest utility; of equal ones the first."""
        return max(self.tried, key=lambda found: found.utility, default=None)

    @property
    def exit_code(self) -> int:
        """0, or 130 after a signal."""
        return INTERRUPTED if self.ended == "interrupted" else 0

    def run_of(self, node: Node) -> Path:
        """Returns the run directory of a candidate."""
        return self.folder / node.name


def search(
    loaded: LoadedRecipe, *, resume: bool = False, overwrite: bool = False, console: Console | None = None
) -> SearchResult:
    """Goes down CoFiTune's tree of ranges, one training run per candidate, and keeps the weights of the best.

    A candidate that has been tried is not tried again, one that was interrupted goes on from its last checkpoint.

    Args:
        loaded: A recipe whose method is ``cofitune``, with a ``search`` section.
        resume: Goes on with an earlier search in the output directory.
        overwrite: Replaces it.
        console: Where progress goes.

    Raises:
        ConfigError: The recipe says too little.
        RefusedError: The output directory is taken, or the recipe is another than that of the search to go on with.
    """
    search = _Search(loaded, console)
    search.check(resume=resume, overwrite=overwrite)
    # Whatever is wrong with data or model is said before anything of an earlier search is touched.
    make_plan(loaded.recipe, meta=True, limit=_CHECKED_ROWS)
    search.check_tasks()
    search.prepare(resume=resume)
    base = search.base_scores()
    section = loaded.recipe.search
    weights = (section.speciality_weight, section.versatility_weight)
    tried = search_tree(search.score, beam=section.beam, weights=weights)
    return SearchResult(search.folder, base, tried, search.ended)


class _Search:
    def __init__(self, loaded: LoadedRecipe, console: Console | None) -> None:
        self.loaded, self.console = loaded, console
        self.folder = Path(loaded.recipe.output_dir)
        self.section = loaded.recipe.search
        self.speciality, self.versatility = _tasks(loaded)
        self.ended = "complete"
        self._log: list[dict[str, Any]] = []
        self._base = Scores(0, 0)
        self._best: tuple[float, Path] | None = None

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Sees that the folder is free, or holds the search to go on with; changes nothing."""
        if self.folder.exists() and not self.folder.is_dir():
            raise RefusedError("the output directory is a file", where=str(self.folder), fix="output_dir=ANOTHER")
        if not self.folder.exists() or not any(self.folder.iterdir()):
            return
        if not (self.folder / MARK).is_file():
            raise RefusedError("the output directory holds files that are not a search's", where=str(self.folder))
        if not resume and not overwrite:
            raise RefusedError(
                "the output directory holds an earlier search", where=str(self.folder), fix="--resume or --overwrite"
            )
        recipe = self.folder / RECIPE
        if resume and _comparable(recipe.read_text(encoding="utf-8")) != _comparable(self.loaded.resolved_yaml()):
            raise RefusedError(
                "the earlier search is that of another recipe",
                where=str(recipe),
                fix="the same recipe (max_runs and max_steps may differ), or --overwrite",
            )

    def check_tasks(self) -> None:
        """Sees that the tasks have rows; those of lm-eval fetch their own."""
        for name, task in {**self.speciality, **self.versatility}.items():
            if not name.startswith(LM_EVAL):
                load_rows(read_task(task), limit=1)

    def prepare(self, *, resume: bool) -> None:
        """Removes what an earlier search has made, unless this one goes on with it, and writes the recipe."""
        if not resume:
            for name in (LOG, BASE, RECIPE):
                (self.folder / name).unlink(missing_ok=True)
            for run in self.folder.glob("[01]??-[01]??_*"):
                shutil.rmtree(run)
        write_json(self.folder / MARK, {"finetune_search": 1})
        write_text(self.folder / RECIPE, self.loaded.resolved_yaml())

    def base_scores(self) -> Scores:
        """Returns what the untouched model reaches."""
        path = self.folder / BASE
        if not path.is_file():
            plan, section = make_plan(self.loaded.recipe), self.loaded.recipe.eval
            results = evaluate_tasks(
                plan.model,
                plan.tokenizer,
                [*self.speciality.values(), *self.versatility.values()],
                limit=section.limit,
                batch_size=section.batch_size,
                max_new_tokens=section.max_new_tokens,
                samples=0,
                console=self.console,
            )
            write_json(path, [result.as_dict() for result in results])
        self._base = self._scores(json.loads(path.read_text(encoding="utf-8")))
        say(self.console, f"base     speciality {self._base.speciality:.1f}  versatility {self._base.versatility:.1f}")
        return self._base

    def score(self, node: Node) -> Scores | None:
        """Trains a candidate, unless that was done before, and returns what it reaches; None ends the search."""
        run = self.folder / node.name
        record = _record(run)
        if record.get("status") != "completed":
            if self._is_spent():
                self.ended = "budget spent"
                return None
            record = self._train(node, run)
            if record.get("status") != "completed":
                self.ended = "interrupted"
                return None
        scores = self._scores(record["evaluation"]["after"])
        self._note(node, run, record, scores)
        return scores

    def _train(self, node: Node, run: Path) -> dict[str, Any]:
        if run.exists() and not (run / RECORD).is_file():
            shutil.rmtree(run)  # killed before it began
        tasks = json.dumps([*self.speciality.values(), *self.versatility.values()])
        overrides = [
            f"output_dir={json.dumps(str(run))}",
            f"method.layers={node.layers}",
            f"method.modules={json.dumps(node.modules)}",
            f"eval.tasks={tasks}",
            "eval.before=false",
            "~search",
        ]
        loaded = load_recipe([str(self.folder / RECIPE)], overrides)
        say(self.console, f"\n{node.layers} {', '.join(node.modules)}")
        return train(loaded, resume="last" if run.exists() else None, console=self.console).record

    def _is_spent(self) -> bool:
        section, steps = self.section, sum(entry["steps"] for entry in self._log)
        runs_spent = section.max_runs is not None and len(self._log) >= section.max_runs
        return runs_spent or (section.max_steps is not None and steps >= section.max_steps)

    def _scores(self, results: Sequence[dict[str, Any]]) -> Scores:
        return Scores(percent(results, list(self.speciality)), percent(results, list(self.versatility)))

    def _note(self, node: Node, run: Path, record: dict[str, Any], scores: Scores) -> None:
        utility = scores.utility((self.section.speciality_weight, self.section.versatility_weight))
        entry = {
            "layers": node.layers,
            "modules": list(node.modules),
            "speciality": scores.speciality,
            "versatility": scores.versatility,
            "utility": utility,
            "gain": scores.speciality - self._base.speciality,
            "retention": scores.versatility / self._base.versatility if self._base.versatility else None,
            "trained": record["method"]["trained"],
            "steps": record["final"]["steps"],
            "seconds": record["seconds"],
            "run": str(run),
        }
        self._log.append(entry)
        write_text(self.folder / LOG, "".join(json.dumps(line) + "\n" for line in self._log))
        say(
            self.console,
            f"search   speciality {scores.speciality:.1f}  versatility {scores.versatility:.1f}  sum {utility:.1f}",
        )
        # Only the best keeps its weights: a search tries a dozen.
        beaten: Path | None = run
        if self._best is None or utility > self._best[0]:
            beaten = None if self._best is None else self._best[1]
            self._best = (utility, run)
        for folder in [*run.glob("checkpoint-*"), *([beaten / "final"] if beaten is not None else [])]:
            shutil.rmtree(folder, ignore_errors=True)


def _tasks(loaded: LoadedRecipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns by name the tasks of speciality and those of versatility."""
    recipe = loaded.recipe
    if not isinstance(recipe.method, dict) or recipe.method.get("name") != "cofitune":
        raise CapabilityError(
            "the search is one for the layers and modules of cofitune",
            where="method.name",
            got=loaded.summary().partition(" on ")[0],
            fix="method.name: cofitune",
        )
    given = {"speciality": recipe.search.speciality or recipe.eval.tasks, "versatility": recipe.search.versatility}
    named: dict[str, dict[str, Any]] = {}
    for key, tasks in given.items():
        if not tasks:
            raise ConfigError(
                f"the search has nothing to measure {key} by",
                where=f"search.{key}",
                want="tasks, as in eval.tasks",
                fix="search.versatility: [loss:general.jsonl]" if key == "versatility" else "eval.tasks: [...]",
            )
        named[key] = {_name_of(task): task for task in tasks}
    both = sorted(named["speciality"].keys() & named["versatility"].keys())
    if both or any(len(named[key]) < len(tasks) for key, tasks in given.items()):
        raise ConfigError(
            "tasks are told apart by their names, and two have the same",
            where="search",
            got=", ".join(both) or ", ".join(map(str, (*given["speciality"], *given["versatility"]))),
            fix="a task file with a name of its own, or {name: ..., kind: ..., data: ...}",
        )
    return named["speciality"], named["versatility"]


def _name_of(task: Any) -> str:
    """Returns what the results of a task call it."""
    if isinstance(task, str) and task.startswith(LM_EVAL):
        return task
    return read_task(task).name


def _record(run: Path) -> dict[str, Any]:
    path = run / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _comparable(text: str) -> dict[str, Any]:
    """Returns what of a resolved recipe must not change within one search."""
    from finetune.config.yaml12 import read_yaml

    data = dict(read_yaml(text, RECIPE).data)
    limits = ("max_runs", "max_steps")
    data["search"] = {key: value for key, value in data["search"].items() if key not in limits}
    return data
