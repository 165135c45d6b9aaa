"""Several processes on this machine, through PyTorch's own launcher."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from finetune.cli.settings import Settings
from finetune.core.errors import TrainingError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["launch", "leave_processes", "lost_a_process"]

INTERRUPTED = 130
_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")


def launch(processes: int, settings: Settings, *, max_restarts: int = 0) -> int:
    """Runs the same command line in several processes, as ``torchrun`` does, and returns its exit code.

    When one of them dies, the others are ended, at once or after 30 seconds, and all start again.

    Args:
        processes: How many.
        settings: With the command line.
        max_restarts: How often they start again.

    Raises:
        TrainingError: One of them was killed; with an exit code it has said itself what was wrong.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # What a process has to say about its end, it says itself.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if settings.debug:
        os.environ["FINETUNE_DEBUG"] = "1"
    # Processes that start again would look for each other at the addresses of those that died, which stay in the store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        torchrun(_torchrun_arguments(processes, settings, max_restarts))
    except ChildFailedError as error:
        rank, first = min(error.failures.items(), key=_blame)
        if first.exitcode > 0:
            return first.exitcode
        raise TrainingError(
            f"process {rank} of {processes} was killed by {first.signal_name()}, which ended the run",
            got=f"{max_restarts} restarts" if max_restarts else "",
            fix="the same command with --resume goes on; finetune train --max-restarts N does so by itself",
        ) from None
    except SignalException:
        return INTERRUPTED
    return 0


def _blame(failed: tuple[int, ProcessFailure]) -> tuple[bool, int]:
    """Orders failures by what they say of the cause: the launcher itself ends the others by SIGTERM.

    Those that wait for a killed process fail within the same second, which is all that their times tell.
    """
    _, failure = failed
    killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
    return not killed, failure.timestamp


def lost_a_process(error: Exception) -> bool:
    """Returns whether an exception says that another process of the run is gone."""
    if "torch" not in sys.modules or "RANK" not in os.environ:
        return False
    import torch.distributed as dist

    says_so = isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST)
    return says_so or isinstance(error, dist.DistError)


def leave_processes() -> None:
    """Ends the talk among processes, where there is any, before the interpreter ends.

    A worker thread of gloo that still holds a tensor by then aborts a process that has done its work (PyTorch #179291).
    """
    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()  # the group ends with the last that holds it, such as DDP's reducer in a cycle
        dist.destroy_process_group()


def _torchrun_arguments(processes: int, settings: Settings, max_restarts: int = 0) -> list[str]:
    launcher = ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={max_restarts}"]
    launcher += settings.launcher_arguments
    common = [flag for flag, on in (("--quiet", settings.quiet), ("--no-color", not settings.color)) if on]
    return [*launcher, "-m", "finetune", *_without_options(settings.arguments, ("--nproc", "--max-restarts")), *common]


def _without_options(arguments: list[str], options: tuple[str, ...]) -> list[str]:
    kept = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument in options:
            next(remaining, None)
        elif not argument.startswith(tuple(f"{option}=" for option in options)):
            kept.append(argument)
    return kept
