"""``run.json`` as it is read for people: an interrupted or failed run has fewer fields."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.core.errors import CheckpointError

__all__ = ["a_task", "command_of", "lookup", "method_settings", "next_commands", "read_record"]

RECORD = "run.json"


def read_record(run: Path) -> dict[str, Any]:
    """Returns the content of a run's ``run.json``.

    Raises:
        CheckpointError: ``run`` is no run directory, or the file is damaged.
    """
    file = run / RECORD
    if not file.is_file():
        raise CheckpointError(
            "this is not a run directory", where=str(run), want=f"a folder with {RECORD}, as finetune train leaves it"
        )
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{RECORD} is damaged", where=str(file), got=str(error)) from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{RECORD} is damaged", where=str(file), got=type(record).__name__, want="a JSON object")
    return record


def lookup(record: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Returns the value at a dotted ``path``; ``default`` where a part of it is missing or None."""
    value: Any = record
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            return default
    return value


def command_of(record: Mapping[str, Any]) -> str:
    """Returns the command that started the run, or an empty string."""
    if record.get("command"):
        return str(record["command"])
    argv = [str(word) for word in record.get("argv") or ()]
    if not argv:
        return ""
    name = Path(argv[0]).name
    program = "finetune" if name in ("finetune", "__main__.py") else f"python {shlex.quote(argv[0])}"
    return " ".join([program, *map(shlex.quote, argv[1:])])


def method_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the run's method; of several methods, each setting by ``METHOD.KEY``."""
    config = lookup(record, "method.config", {})
    if isinstance(config, Mapping):
        return dict(config)
    return {f"{member['name']}.{key}": value for member in config for key, value in member.items() if key != "name"}


def a_task(record: Mapping[str, Any]) -> str | None:
    """Returns one of the tasks that the tuned model tells apart, or None where it does not."""
    settings = method_settings(record)
    tasks = next((value for key, value in settings.items() if key.rpartition(".")[2] == "tasks" and value), None)
    return None if tasks is None else str(tasks[-1])


def next_commands(run: Path, record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what a user may type next, and what for."""
    folder = shlex.quote(str(run))
    task = "" if (name := a_task(record)) is None else f" --task {shlex.quote(name)}"
    if record.get("status") == "completed" or (run / "final").is_dir():
        return [
            (f"finetune chat {folder}{task}", "talk to the tuned model"),
            (f"finetune eval {folder}", "evaluate it again"),
            (f"finetune merge {folder} {shlex.quote(f'{run}-merged')}{task}", "write it as a plain Hugging Face model"),
        ]
    config = shlex.quote(str(run / "config.resolved.yaml"))
    if any(run.glob("checkpoint-*")):
        return [(f"finetune train {config} --resume", "go on from the last checkpoint")]
    return [(f"finetune train {config} --overwrite", "start again")]
