"""The folder of a selection: what is in it, whether a run may use it, and whether its measurements still count."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.core.errors import Problem, RefusedError
from finetune.core.files import write_json, write_text

__all__ = ["SelectionFolder"]

_MADE = (
    "log",
    "vectors",
    "selected",
    "plots",
    "scores.parquet",
    "dropped.jsonl",
    "manifest.json",
    "report.html",
    "select.yaml",
)
_LOCK = ".lock"


class SelectionFolder:
    """Where a selection lies.

    Args:
        path: The recipe's ``output_dir``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log, self.vectors = path / "log", path / "vectors"
        self.selected, self.plots = path / "selected", path / "plots"
        self.scores, self.dropped = path / "scores.parquet", path / "dropped.jsonl"
        self.manifest, self.report, self.recipe = path / "manifest.json", path / "report.html", path / "select.yaml"
        self._identity = path / "scoring.json"

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Sees that the folder is free, or holds the selection to go on with; changes nothing.

        Raises:
            RefusedError: It is a file, holds something else, or holds a selection that nobody said what to do with.
        """
        where = f"output_dir: {self.path}"
        if self.path.exists() and not self.path.is_dir():
            raise RefusedError("the output directory is a file", where=where, fix="output_dir=ANOTHER")
        if not self.path.exists() or not any(entry.name != _LOCK for entry in self.path.iterdir()):
            return
        if not self._identity.is_file():
            raise RefusedError(
                "the output directory holds files that are not a selection's", where=where, fix="output_dir=ANOTHER"
            )
        if not resume and not overwrite:
            raise RefusedError(
                "the output directory holds an earlier selection",
                where=where,
                fix="--resume to go on with it (nothing is scored twice), --overwrite to replace it, or another folder",
            )

    def begin(self, identity: Mapping[str, Any], recipe: str, *, resume: bool) -> None:
        """Clears what an earlier selection made, unless this one goes on with it, and writes what this one is.

        Args:
            identity: All that measurements depend on.
            recipe: The resolved recipe, as YAML.
            resume: Whether measurements that are there are used.

        Raises:
            RefusedError: They were made in another way.
        """
        if resume and self._identity.is_file():
            self._compare(identity)
        else:
            for name in _MADE:
                made = self.path / name
                shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)
            write_json(self._identity, {**identity, "models": {}})
        write_text(self.recipe, recipe)

    def recognise(self, model: str, fingerprint: str) -> None:
        """Sees that a model is the one that measured before, by its weights.

        Raises:
            RefusedError: It is another one of the same name.
        """
        known = self._read()
        before = known["models"].setdefault(model, fingerprint)
        if before != fingerprint:
            raise RefusedError(
                "the model is not the one that scored the earlier rows",
                where=f"output_dir: {self.path}",
                got=f"{model} with fingerprint {fingerprint}",
                want=f"fingerprint {before}",
                fix="--overwrite to score all rows anew, or output_dir=ANOTHER",
            )
        write_json(self._identity, known)

    def dtype(self) -> str | None:
        """Returns the dtype that rows were scored in; None where none was."""
        return str(self._read()["dtype"]) if self._identity.is_file() else None

    def fingerprints(self) -> dict[str, str]:
        """Returns the models that measured, with their fingerprints."""
        return dict(self._read()["models"])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other processes of the same machine out.

        Raises:
            RefusedError: One is at work here.
        """
        from filelock import FileLock, Timeout

        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.path / _LOCK, timeout=0):
                yield
        except Timeout as error:
            raise RefusedError(
                "another process is scoring into the output directory",
                where=f"output_dir: {self.path}",
                fix="wait for it, or output_dir=ANOTHER",
            ) from error

    def _compare(self, identity: Mapping[str, Any]) -> None:
        before = self._read()
        changed = [key for key in identity if identity[key] != before.get(key)]
        if changed:
            problems = [
                Problem(
                    f"the earlier rows were scored with another {key}",
                    where=f"output_dir: {self.path}",
                    got=json.dumps(identity[key]),
                    want=json.dumps(before.get(key)),
                    fix="--overwrite to score all rows anew, or output_dir=ANOTHER",
                )
                for key in changed
            ]
            raise RefusedError.of(problems)

    def _read(self) -> dict[str, Any]:
        return dict(json.loads(self._identity.read_text(encoding="utf-8")))
