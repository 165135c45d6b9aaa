"""What the machine has left and what this process takes: memory and disk, in bytes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

__all__ = ["available_memory", "free_disk", "peak_resident_bytes", "resident_bytes"]

_CGROUPS = Path("/sys/fs/cgroup")


def available_memory(device: str = "cpu") -> int:
    """Returns the bytes that this process may still take.

    Args:
        device: ``cpu`` for main memory, which a container's limit may make smaller than the machine's; ``cuda`` or
            ``cuda:1`` for what is free on that accelerator; any other accelerator shares main memory.
    """
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return int(free)
    import psutil

    return min([int(psutil.virtual_memory().available), *_container_room(_CGROUPS, _own_cgroup())])


def resident_bytes() -> int:
    """Returns the bytes of main memory that this process takes now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Returns the most bytes of main memory that this process ever took at once."""
    status = Path("/proc/self/status")
    if status.is_file():
        # getrusage would include what the parent took before it started this process.
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_disk(path: str | Path) -> int:
    """Returns the bytes that may still be written below ``path``, which need not exist yet."""
    absolute = Path(path).absolute()
    existing = next(folder for folder in (absolute, *absolute.parents) if folder.exists())
    return shutil.disk_usage(existing).free


def _own_cgroup() -> str:
    """Returns this process's control group, relative to the root of the hierarchy (version 2), or an empty string."""
    membership = Path("/proc/self/cgroup")
    if not membership.is_file():
        return ""
    lines = membership.read_text(encoding="utf-8").splitlines()
    return next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")


def _container_room(root: Path, group: str) -> list[int]:
    """Returns what each memory limit over ``group`` leaves, in bytes; cached file pages count as room."""
    folder = root / group if (root / group).is_dir() else root
    rooms = []
    while True:
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit is not None and used is not None:
            rooms.append(max(0, limit - used + _file_pages(folder / "memory.stat")))
        if folder == root:
            return rooms
        folder = folder.parent


def _read(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _file_pages(file: Path) -> int:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
