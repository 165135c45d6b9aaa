"""Averages the gradients of trained parameters that every process has whole, while the backward pass goes on.

``DistributedDataParallel`` fixes what trains when it wraps a model, and FSDP2 leaves what it does not shard alone. This
follows the set as it is at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["GradientReducer"]

_BUCKET_BYTES = 25 * 2**20


@dataclass
class _Bucket:
    """Parameters whose gradients travel together, in float32, with a flag for each that there is one."""

    parameters: Sequence[nn.Parameter]
    waiting: set[int] = field(default_factory=set)
    flat: Tensor | None = None
    work: dist.Work | None = None

    def launch(self) -> None:
        flags = [float(parameter.grad is not None) for parameter in self.parameters]
        parts = [
            torch.zeros(p.numel(), device=p.device) if p.grad is None else p.grad.detach().reshape(-1).float()
            for p in self.parameters
        ]
        self.flat = torch.cat([*parts, torch.tensor(flags, device=parts[0].device)])
        self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self) -> None:
        assert self.flat is not None
        assert self.work is not None
        self.work.wait()
        sizes = [parameter.numel() for parameter in self.parameters]
        *parts, flags = self.flat.div_(dist.get_world_size()).split([*sizes, len(sizes)])  # type: ignore[no-untyped-call]
        for parameter, part, anyone in zip(self.parameters, parts, flags.tolist(), strict=True):
            if not anyone:
                continue  # as in one process: no gradient is not a gradient of zero
            if parameter.grad is None:
                parameter.grad = part.view_as(parameter).to(parameter.dtype)
            else:
                parameter.grad.copy_(part.view_as(parameter))
        self.flat = self.work = None


class GradientReducer:
    """Leaves in ``.grad`` the mean over the processes, as ``DistributedDataParallel`` does.

    Gradients travel in buckets of 25 MB in the order in which the backward pass makes them, each as soon as its last
    one is there. A process that has no gradient of a parameter counts with zero; where none has one, there is none
    after.

    Args:
        trained: Returns the parameters that may train, the same and in the same order in every process. Those that
            require no gradient when a backward pass begins rest.

    Attributes:
        bytes: Bytes that this process has handed in so far.
    """

    def __init__(self, trained: Callable[[], Iterable[nn.Parameter]]) -> None:
        self._trained = trained
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._buckets: list[_Bucket] = []
        self._next = 0
        self.bytes = 0

    def begin(self) -> None:
        """Expects the gradients of the backward pass that comes: the last one before the optimizer's step."""
        active = [parameter for parameter in self._trained() if parameter.requires_grad]
        for parameter in active:
            if id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._ready
                )
        self._buckets = [
            _Bucket(parameters, {id(parameter) for parameter in parameters})
            for parameters in _bucketed(list(reversed(active)))
        ]
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._next = 0

    def finish(self) -> None:
        """Sends what is left and puts the means in place; the backward pass is over."""
        self._launch(len(self._buckets))
        for bucket in self._buckets:
            bucket.finish()
        self._buckets = []

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def _ready(self, parameter: Tensor) -> None:
        if not self._buckets:
            return  # a micro-batch before the last one, or nobody of ours
        self._bucket_of[id(parameter)].waiting.discard(id(parameter))
        complete = self._next
        while complete < len(self._buckets) and not self._buckets[complete].waiting:
            complete += 1
        self._launch(complete)

    def _launch(self, end: int) -> None:
        # In the same order everywhere, whichever gradients a process has: collectives pair up by their order.
        for bucket in self._buckets[self._next : end]:
            bucket.launch()
            assert bucket.flat is not None
            self.bytes += bucket.flat.numel() * bucket.flat.element_size()
        self._next = max(self._next, end)


def _bucketed(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        size = 4 * parameter.numel()
        if not buckets or size > room:
            buckets.append([])
            room = _BUCKET_BYTES
        buckets[-1].append(parameter)
        room -= size
    return buckets
