"""Several processes on this machine, through PyTorch's own launcher."""

from __future__ import annotations

import gc
import logging
import os

from finetune.cli.settings import Settings

__all__ = ["launch", "leave_processes"]

INTERRUPTED = 130


def launch(processes: int, settings: Settings) -> int:
    """Runs the same command line in ``processes`` processes, as ``torchrun`` does, and returns its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # What a process has to say about its end, it says itself.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if settings.debug:
        os.environ["FINETUNE_DEBUG"] = "1"
    try:
        torchrun(_torchrun_arguments(processes, settings))
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 1
    except SignalException:
        return INTERRUPTED
    return 0


def leave_processes() -> None:
    """Ends the talk among processes, where there is any, before the interpreter ends.

    A worker thread of gloo that still holds a tensor by then aborts a process that has done its work (PyTorch #179291).
    """
    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()  # the group ends with the last that holds it, such as DDP's reducer in a cycle
        dist.destroy_process_group()


def _torchrun_arguments(processes: int, settings: Settings) -> list[str]:
    launcher = ["--standalone", f"--nproc-per-node={processes}", *settings.launcher_arguments]
    common = [flag for flag, on in (("--quiet", settings.quiet), ("--no-color", not settings.color)) if on]
    return [*launcher, "-m", "finetune", *_without_option(settings.arguments, "--nproc"), *common]


def _without_option(arguments: list[str], option: str) -> list[str]:
    kept = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == option:
            next(remaining, None)
        elif not argument.startswith(f"{option}="):
            kept.append(argument)
    return kept
