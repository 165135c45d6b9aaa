"""Tasks: a YAML file that says what is measured, beside a data file with the rows.

Example:
    A task is found by its path, or by its name where the package ships it::

        name: cron
        kind: exact_match      # exact_match | choice | loss
        data: test.jsonl       # relative to this file, or shipped:..., or a hub name
        max_new_tokens: 16

Rows have any format that training data may have; the last assistant message is the right answer. Rows of ``choice``
also have ``choices``, a list of texts of which one is the answer. Rows may have ``group``: it is reported for itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from finetune.core.errors import ConfigError, DataError, Problem, list_choices, nearest
from finetune.core.shipped import resolve_data_path, shipped_path, shipped_yaml
from finetune.data.choices import choices_problem
from finetune.data.load import load_conversations
from finetune.data.records import Conversation
from finetune.data.task_template import NamedTemplate
from finetune.evaluation.results import evenly_spaced

__all__ = ["LM_EVAL", "Task", "load_rows", "read_task"]

LM_EVAL = "lm-eval:"
"""A task whose name begins so is lm-eval's."""

Kind = Literal["exact_match", "choice", "loss"]
KINDS: tuple[Kind, ...] = ("exact_match", "choice", "loss")


class Task(BaseModel):
    """What is measured, and on which rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="What the task is called in results.")
    kind: Kind | Literal["lm_eval"] = Field(
        description="exact_match of greedy generations, choice by likelihood, or held-out loss and perplexity."
    )
    data: str = Field(default="", description="File with the rows, relative to the task's file; or a hub name.")
    split: str | None = Field(default=None, description="Split of a hub data set.")
    format: str = Field(default="auto", description="Format of the rows, as data.format.")
    columns: dict[str, str] = Field(default={}, description="Our column -> the file's, as data.columns.")
    system: str | None = Field(default=None, description="System message of rows that have none, as data.system.")
    template: NamedTemplate = Field(default=None, description="Words for labelled rows, as data.template.")
    max_new_tokens: int | None = Field(default=None, ge=1, description="Limit of a generation; None: eval's.")
    task: str | None = Field(
        default=None, description="Which task of the training rows this is, for methods that route; None: its name."
    )
    description: str = Field(default="", description="One line on what the task is about.")

    @property
    def trained_as(self) -> str:
        """Name of the task among those of the training rows."""
        return self.task or self.name


@dataclass(frozen=True)
class _Source:
    """The one source of a task, in the form that ``load_conversations`` takes."""

    path: str
    split: str | None
    weight: float = 1.0
    format: str | None = None
    subset: str | None = None
    columns: Mapping[str, str] | None = None
    task: str | None = None


def read_task(given: str | Mapping[str, Any]) -> Task:
    """Returns the task that ``given`` means, its data path resolved.

    Args:
        given: The path of a task's YAML file, the name of a shipped task, ``KIND:DATA`` (for example
            ``exact_match:data/test.jsonl``), ``lm-eval:NAME``, or the content of a task file.

    Raises:
        ConfigError: There is no such task, its content is wrong, or lm-eval is not installed.
    """
    if isinstance(given, Mapping):
        return _checked(dict(given), "eval.tasks", None)
    if given.startswith(LM_EVAL):
        _require_lm_eval(given)
        return Task(name=given.removeprefix(LM_EVAL), kind="lm_eval")
    kind, separator, data = given.partition(":")
    if separator and kind in KINDS:
        return _checked({"name": Path(data).stem, "kind": kind, "data": data}, given, None)
    path = Path(given)
    if not path.is_file():
        shipped = shipped_yaml("task")
        if given not in shipped:
            raise ConfigError(
                f"unknown task {given!r}",
                where="eval.tasks",
                want=f"{list_choices(shipped)}, a task's YAML file, KIND:DATA, or {LM_EVAL}NAME",
                near=nearest(given, shipped),
            )
        path = shipped_path(shipped[given])
    content = _read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError("a task file is a map of keys", where=str(path), want=list_choices(Task.model_fields))
    return _checked({"name": path.stem, **content}, str(path), path.parent)


def _read_yaml(path: Path) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError

    try:
        return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = str(path) if mark is None else f"{path}:{mark.line + 1}:{mark.column + 1}"
        raise ConfigError("the task file is not valid YAML", where=where, got=str(error.problem)) from error
    except UnicodeDecodeError as error:
        raise ConfigError("the task file is not UTF-8 text", where=str(path), got=str(error)) from error


def _checked(content: dict[str, Any], where: str, folder: Path | None) -> Task:
    try:
        task = Task.model_validate(content)
    except ValidationError as error:
        raise ConfigError.of([_problem(entry, where) for entry in error.errors()]) from error
    if not task.data:
        raise ConfigError("a task needs rows", where=f"{where}  data", want="a data file or a hub name")
    return task.model_copy(update={"data": resolve_data_path(task.data, folder)})


def _problem(entry: Any, where: str) -> Problem:
    key = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "extra_forbidden":
        known = list(Task.model_fields)
        return Problem(f"unknown key {key!r}", f"{where}  {key}", want=list_choices(known), near=nearest(key, known))
    got = "" if entry["type"] == "missing" else repr(entry["input"])
    return Problem(entry["msg"][0].lower() + entry["msg"][1:], f"{where}  {key}", got)


def _require_lm_eval(given: str) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "tasks of lm-eval need a package that is not installed",
            where="eval.tasks",
            got=given,
            fix='pip install "finetune-toolkit[eval]"',
        )


def load_rows(task: Task, limit: int | None) -> list[Conversation]:
    """Returns the task's rows in order, at most ``limit`` of them, evenly spaced.

    Raises:
        DataError: A row is unusable (all such rows are reported together), or there is none.
    """
    source = _Source(task.data, task.split)
    rows, _ = load_conversations(
        [source],
        format=task.format,
        columns=task.columns,
        system=task.system,
        template=task.template,
        on_error="fail",
    )
    problems = [problem for row in rows if (problem := _row_problem(task, row))]
    if problems:
        raise DataError.of(problems)
    if not rows:
        raise DataError("the task has no rows", where=task.data)
    return [rows[position] for position in evenly_spaced(len(rows), limit)]


def _row_problem(task: Task, row: Conversation) -> Problem | None:
    where = f"{row.source}:{row.line}" if row.line is not None else f"{row.source} {row.id}"
    if task.kind == "loss":
        return None
    if not row.messages or row.messages[-1].role != "assistant":
        return Problem("the row has no right answer", where, want="an assistant message at the end")
    return choices_problem(row) if task.kind == "choice" else None
