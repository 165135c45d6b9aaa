"""``finetune train`` in a process of its own, which a test may kill, and what it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

__all__ = ["finish", "learned", "logged", "start", "wait_for"]


def start(recipe: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts it, with the cache beside the recipe."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FINETUNE_CACHE": str(recipe.parent / "cache")}
    command = [sys.executable, "-m", "finetune", "train", str(recipe), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """Waits for its end, which has to be of that exit code, and returns what it said."""
    _, errors = process.communicate(timeout=200)
    assert process.returncode == code, errors[-3000:]
    return errors


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Waits until ``condition`` holds; False where the process ended before."""
    while not condition():
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return True


def logged(run: Path, steps: int) -> Callable[[], bool]:
    """Returns a condition that holds once so many steps are logged."""
    metrics = run / "metrics.jsonl"
    return lambda: metrics.is_file() and metrics.read_text().count("\n") >= steps


def learned(run: Path) -> dict[str, Tensor]:
    """Returns what a run has saved in the end."""
    return {
        f"{file.name}:{name}": tensor
        for file in sorted((run / "final").glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
