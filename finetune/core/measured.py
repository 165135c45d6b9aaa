"""Choices that a machine makes by measuring, made once, so that the next process chooses the same and runs repeat."""

from __future__ import annotations

import platform
from collections.abc import Callable

from finetune.core.files import cache_folder, read_cached, write_json

__all__ = ["measured_choice"]

_FILE = "measured.json"


def measured_choice(question: str, measure: Callable[[], str]) -> str:
    """Returns what ``measure`` found when this machine was first asked ``question``, and measures if it never was.

    The answers lie in the cache folder. Where that cannot be written, each process measures for itself.

    Args:
        question: What is chosen, with all that the answer depends on besides the machine, torch, and its threads.
        measure: Returns the name of the best choice.
    """
    import torch

    machine = f"{platform.node()} {platform.machine()} torch {torch.__version__} {torch.get_num_threads()} threads"
    key, path = f"{machine}: {question}", cache_folder() / _FILE
    known = read_cached(path)
    if key not in known:
        answer = measure()
        # Another process may have answered meanwhile: the first answer counts.
        known = {key: answer, **read_cached(path)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, known)
        except OSError:
            return answer
    return str(known[key])
