"""The peak memory of this process, on the device that trains."""

from __future__ import annotations

import torch

from finetune.planning.host import peak_resident_bytes

__all__ = ["peak_device_bytes"]


def peak_device_bytes() -> int:
    """Returns the most bytes allocated on the accelerator so far, or resident in RAM where the CPU trains."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()
