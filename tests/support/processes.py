"""Scripts that train in processes of their own: one, or several that talk over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["one_and_two_processes", "run_script"]

_TESTS = Path(__file__).parents[1]


def run_script(script: Path, *arguments: object, processes: int = 1) -> None:
    """Runs a script, one thread per process; its output is shown where it fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_TESTS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def one_and_two_processes(folder: Path, source: str, *arguments: object) -> tuple[Any, Any]:
    """Runs ``source`` in one process and in two, and returns what each saved with torch at its first argument."""
    script = folder / "script.py"
    script.write_text(source)
    results = []
    for processes in (1, 2):
        out = folder / f"{processes}.pt"
        run_script(script, out, *arguments, processes=processes)
        results.append(torch.load(out))
    return results[0], results[1]
