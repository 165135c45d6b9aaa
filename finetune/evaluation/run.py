"""Evaluates a model on tasks: in the middle of a run, or from where a run left it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.errors import ConfigError, FinetuneError, Problem, list_choices
from finetune.core.files import write_json, write_text
from finetune.core.shipped import shipped_names
from finetune.evaluation.results import TaskResult
from finetune.evaluation.score import ProgressOf, Scoring, score_task
from finetune.evaluation.tasks import Task, read_task

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn
    from transformers import PreTrainedTokenizerBase

__all__ = ["evaluate_run", "evaluate_tasks"]


def evaluate_tasks(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str | Mapping[str, Any]],
    *,
    limit: int | None = None,
    batch_size: int = 16,
    max_new_tokens: int = 64,
    samples: int = 4,
    console: Console | None = None,
) -> list[TaskResult]:
    """Returns the results of ``model`` on ``tasks``, in order; the model is left as it was.

    Args:
        model: A causal LM, plain or wrapped by PEFT.
        tokenizer: Its tokenizer, with the chat template that it was or will be trained with.
        tasks: See :func:`finetune.evaluation.tasks.read_task`.
        limit: Rows of each task, evenly spaced; None for all.
        batch_size: Rows of one forward pass.
        max_new_tokens: Limit of a generation where the task has none of its own.
        samples: Predictions that each result shows.
        console: Where progress is shown, if anywhere.

    Raises:
        ConfigError: A task is wrong (all wrong ones are reported together).
        DataError: A row is unusable.
    """
    checked = _read_tasks(tasks)
    scoring = Scoring(limit, batch_size, max_new_tokens, samples)
    with _progress(console) as progress_of:
        return [result for task in checked for result in score_task(model, tokenizer, task, scoring, progress_of)]


def evaluate_run(
    target: str,
    tasks: Sequence[str | Mapping[str, Any]] = (),
    *,
    base: str | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    max_new_tokens: int = 64,
    samples: int = 4,
    output: Path | None = None,
    console: Console | None = None,
) -> list[TaskResult]:
    """Loads ``target``, evaluates it, and writes the results.

    Args:
        target: Run directory, its ``final`` folder, a plain model folder, hub id or bundled model.
        tasks: See :func:`finetune.evaluation.tasks.read_task`; none means those of the run's own recipe.
        base: The base model, where the target does not know it.
        limit: As for :func:`evaluate_tasks`, as for ``batch_size``, ``max_new_tokens``, ``samples`` and ``console``.
        batch_size: See ``limit``.
        max_new_tokens: See ``limit``.
        samples: See ``limit``.
        output: JSON file for the results (predictions go beside it, one ``.jsonl`` per task); None means
            ``eval/final.json`` of a run directory, and no file for anything else.
        console: See ``limit``.

    Raises:
        ConfigError: A task is wrong, there is none, or the model cannot be loaded.
        CheckpointError: The learned state is damaged or belongs to another base.
        DataError: A row is unusable.
    """
    from finetune.models import load_tuned

    run = _run_folder(target)
    tasks = list(tasks) or _recorded_tasks(run)
    if not tasks:
        raise ConfigError(
            "no task is given, and the target's recipe names none",
            where=target,
            want=f"{list_choices(shipped_names('task'))}, or a task's YAML file",
            fix=f"finetune eval {target} --task {shipped_names('task')[0]}",
        )
    _read_tasks(tasks)  # before the weights are loaded
    model, tokenizer = load_tuned(target, base=base)
    results = evaluate_tasks(
        model,
        tokenizer,
        tasks,
        limit=limit,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        samples=samples,
        console=console,
    )
    if output is None and run is not None:
        output = run / "eval" / "final.json"
    if output is not None:
        _write(output, target, results)
    return results


def _read_tasks(tasks: Sequence[str | Mapping[str, Any]]) -> list[Task]:
    read: list[Task] = []
    problems: list[Problem] = []
    for task in tasks:
        try:
            read.append(read_task(task))
        except FinetuneError as error:
            problems += error.problems
    if problems:
        raise ConfigError.of(problems)
    return read


def _run_folder(target: str) -> Path | None:
    return next((folder for folder in (Path(target), Path(target).parent) if (folder / "run.json").is_file()), None)


def _recorded_tasks(run: Path | None) -> list[str | Mapping[str, Any]]:
    from ruamel.yaml import YAML

    recipe = None if run is None else run / "config.resolved.yaml"
    if recipe is None or not recipe.is_file():
        return []
    content = YAML(typ="safe", pure=True).load(recipe.read_text(encoding="utf-8"))
    return list((content.get("eval") or {}).get("tasks") or [])


def _write(output: Path, target: str, results: Sequence[TaskResult]) -> None:
    """Writes the results; those of other tasks that the file already has are kept."""
    new = [result.as_dict() for result in results]
    kept = [] if not output.is_file() else json.loads(output.read_text(encoding="utf-8")).get("results", [])
    measured = {(result["task"], result["metric"]) for result in new}
    kept = [result for result in kept if (result["task"], result["metric"]) not in measured]
    write_json(output, {"target": target, "results": [*kept, *new]})
    for result in results:
        if result.predictions:
            lines = [json.dumps(vars(prediction), ensure_ascii=False) for prediction in result.predictions]
            write_text(output.with_name(f"{output.stem}.{result.task}.jsonl"), "\n".join(lines) + "\n")


@contextmanager
def _progress(console: Console | None) -> Iterator[ProgressOf]:
    """Yields what makes a progress bar per task; on anything but a terminal there is none."""
    if console is None or not console.is_terminal:
        yield lambda name, total: lambda done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("eval     {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:

        def progress_of(name: str, total: int) -> Callable[[int], object]:
            bar = bars.add_task(name, total=total)
            return lambda done: bars.advance(bar, done)

        yield progress_of
