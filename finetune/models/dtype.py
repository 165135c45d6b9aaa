"""``auto`` for the dtype and the attention implementation: what is fastest on this machine, found by trying."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from finetune.core.measured import measured_choice

if TYPE_CHECKING:
    import torch

__all__ = ["best_attention", "best_dtype", "resolve_device"]

_EAGER_MAX_LENGTH = 512
"""Eager attention keeps heads x length^2 probabilities, so longer rows never use it."""


def resolve_device(name: str) -> torch.device:
    """Returns the device of that name; ``auto`` is the accelerator if there is one, else the CPU."""
    import torch

    if name != "auto":
        return torch.device(name)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


@functools.cache
def best_dtype(device: torch.device) -> torch.dtype:
    """Returns bfloat16 where ``device`` multiplies it faster than float32, else float32.

    Without matrix instructions for it a CPU emulates bfloat16, up to a hundred times slower than float32.
    """
    import torch

    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    # Measured by each process: a mistake that were kept would slow down every run from then on.
    return min((torch.float32, torch.bfloat16), key=lambda dtype: _time_linear(device, dtype))


def _time_linear(device: torch.device, dtype: torch.dtype) -> float:
    import torch

    x = torch.ones(64, 256, device=device, dtype=dtype)
    weight = torch.ones(256, 256, device=device, dtype=dtype)

    def forward_and_backward() -> None:
        (torch.nn.functional.linear(x, weight) @ weight).sum().item()

    return _best_seconds(forward_and_backward)


def best_attention(
    *, device: torch.device, dtype: torch.dtype, batch: int, heads: int, head_dim: int, length: int
) -> str:
    """Returns ``eager`` or ``sdpa``, whichever is faster forward and backward on the CPU for such rows.

    Args:
        device: Where the model trains; any accelerator gets ``sdpa``.
        dtype: Compute dtype.
        batch: Rows of a micro-batch.
        heads: Query heads.
        head_dim: Width of a head.
        length: Typical tokens of a row.
    """
    if device.type != "cpu" or length > _EAGER_MAX_LENGTH:
        return "sdpa"
    shape = (batch, heads, length, head_dim)
    return measured_choice(f"attention {shape} {dtype}", lambda: _fastest_attention(shape, dtype))


def _fastest_attention(shape: tuple[int, int, int, int], dtype: torch.dtype) -> str:
    import torch

    batch, _, length, head_dim = shape
    query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype).triu(1).expand(batch, 1, -1, -1)

    def eager() -> torch.Tensor:
        scores = query @ key.transpose(-1, -2) * head_dim**-0.5 + mask
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype) @ value

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    seconds = {kind.__name__: _best_seconds(lambda kind=kind: kind().sum().backward()) for kind in (eager, sdpa)}  # type: ignore[misc]
    return min(seconds, key=lambda name: seconds[name])


def _best_seconds(action: Callable[[], None], rounds: int = 3) -> float:
    action()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
