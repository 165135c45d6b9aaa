"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.core.errors import RefusedError

__all__ = [
    "MANIFEST",
    "cache_folder",
    "fsync_folder",
    "hash_file",
    "incomplete_reason",
    "read_cached",
    "replaced_file",
    "replaced_folder",
    "require_empty",
    "write_json",
    "write_manifest",
    "write_text",
]

MANIFEST = "manifest.json"


def cache_folder() -> Path:
    """Returns ``$FINETUNE_CACHE``, or ``finetune`` in the user's cache folder."""
    given = os.environ.get("FINETUNE_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "finetune"


def read_cached(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of the cache; an empty one where it is missing or damaged: it is made anew."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def fsync_folder(folder: Path) -> None:
    """Makes the entries of ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yields a path beside ``path`` to write to; on success it is fsynced and takes the place of ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    beside = Path(name)
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.chmod(0o644)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Yields a new folder beside ``path`` to fill; on success it takes the place of ``path``.

    A folder that ``path`` already names is moved aside first and removed last, so one of the two is always whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield beside
        for file in beside.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        beside.chmod(0o755)
        if path.exists():
            old = beside.with_name(beside.name + ".old")
            path.replace(old)
            beside.replace(path)
            shutil.rmtree(old)
        else:
            beside.replace(path)
        fsync_folder(path.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` as UTF-8; the file appears whole or not at all."""
    with replaced_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON; the file appears whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False) + "\n")


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Writes ``manifest.json``, the mark of completeness: size in bytes and SHA-256 of every other file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": hash_file(path)} for path in files
    }
    write_json(folder / MANIFEST, {"files": entries})


def incomplete_reason(folder: Path) -> str:
    """Returns why ``folder`` is not the complete folder that its manifest describes, or an empty string."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"{MANIFEST} is missing"
    try:
        entries: dict[str, dict[str, Any]] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError):
        return f"{MANIFEST} is unreadable"
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
        if hash_file(path) != entry["sha256"]:
            return f"{name} has another content than was written"
    return ""


def require_empty(out: Path) -> None:
    """Checks that ``out`` can be written without losing anything.

    Raises:
        RefusedError: It is a file or a folder that is not empty.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise RefusedError("the output is there already", where=str(out), fix="another folder, or remove this one")
