"""FSDP2: every process has a part of the weights and gathers a block's when it computes with them.

What adapters and selected entries train stays whole in every process, and only its gradients are averaged, in float32:
sharding a frozen model costs no gradient traffic besides. Whole tensors that train are taken apart with the rest, and
so are their gradients and optimizer state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from finetune.core.errors import TrainingError
from finetune.engines.engine import require_processes
from finetune.engines.int8_gather import gather_int8
from finetune.engines.optimizer_state import shard_state, whole_state
from finetune.engines.reducer import GradientReducer
from finetune.engines.replicated import Replicated
from finetune.methods.primitives.blocks import find_blocks

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from transformers import Trainer

    from finetune.methods import Method

__all__ = ["Sharded"]


class Sharded(Replicated):
    """FSDP2, over all processes or within groups of ``shard_size`` that each have the whole model.

    Args:
        processes: How many train.
        shard_size: Processes of a group; all of them is plain FSDP, fewer is HSDP.
        offload: Whether shards wait in the CPU's memory until an accelerator computes with them.
        int8: Whether the blocks' weights, none of which may ever change, are gathered as int8.
    """

    name: ClassVar[str] = "fsdp"
    together: ClassVar[bool] = True

    def __init__(self, processes: int, *, shard_size: int, offload: bool = False, int8: bool = False) -> None:
        super().__init__(processes)
        self.shard_size, self.offload, self.int8 = shard_size, offload, int8

    def describe(self) -> str:
        """Returns how the model is shared, in a line."""
        groups = self.processes // self.shard_size
        copies = f", {groups} copies of the model" if groups > 1 else ""
        place = "; shards wait in the CPU's memory" if self.offload else ""
        form = ", gathered as int8" if self.int8 else ""
        return f"fsdp: weights sharded over {self.shard_size} of {self.processes} processes{copies}{form}{place}"

    def prepare(self, model: nn.Module, method: Method, device: torch.device) -> None:
        """Takes the model apart, block by block, so that no process ever has it whole on the device."""
        mesh = _mesh(device.type, self.processes, self.shard_size)
        self._model, self._method = model, method
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        _, blocks = find_blocks(base)
        apart = set() if method.shards else set(method.trained_parameters().values())
        apart |= set(model.parameters()) - set(base.parameters())  # what a prompt encoder keeps frozen is learned state
        options: dict[str, Any] = {
            "mesh": mesh,
            "ignored_params": apart,
            "mp_policy": _precision(base, method),
            "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu") if self.offload else OffloadPolicy(),
        }
        for parameter in apart:
            parameter.data = parameter.data.to(device)
        embedding = base.get_input_embeddings()
        if embedding.weight is not getattr(base.get_output_embeddings(), "weight", None):
            fully_shard(embedding, **options)
            # Looking rows up needs no weight in the backward pass, but FSDP2 would fetch it ahead all the same.
            embedding.set_unshard_in_backward(any(p.requires_grad for p in embedding.parameters()))
        for block in blocks:
            fully_shard(block, **options)
            if self.int8:
                gather_int8(cast(FSDPModule, block))
        # The outermost module: some tuners call the forward of the model within, past its hooks.
        fully_shard(model, **options)
        register_fsdp_forward_method(model, "generate")
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        self.root = cast(FSDPModule, model)
        self.reducer = GradientReducer(self._replicated)

    def settle(self) -> None:
        """Takes apart again what FSDP2 keeps gathered for the backward pass, in whose place nothing may be written."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Averages over the groups after the last one before a step; within a group gradients stay sharded always."""
        self.settle()  # an evaluation may have come before
        self.root.set_requires_all_reduce(last)
        with super().micro_batch(last=last):
            yield

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's state gathered onto the CPU."""
        return whole_state(optimizer)

    def place_optimizer_state(self, optimizer: Optimizer) -> None:
        """Keeps this process's shards of it."""
        shard_state(optimizer)

    def verify(self, trainer: Trainer) -> None:
        """Checks that weights are sharded, by nobody else.

        Raises:
            TrainingError: They are not, or accelerate has wrapped the model besides.
        """
        require_processes(trainer, self.processes)
        sharded = sum(isinstance(parameter, DTensor) for parameter in self._model.parameters())
        if not sharded or trainer.accelerator.unwrap_model(trainer.model_wrapped) is not trainer.model_wrapped:
            raise TrainingError(
                "the model is not sharded as the recipe says",
                where="engine.strategy",
                got=f"{sharded} sharded tensors, in {type(trainer.model_wrapped).__name__}",
            )


def _mesh(device_type: str, processes: int, shard_size: int) -> DeviceMesh:
    if shard_size == processes:
        return init_device_mesh(device_type, (processes,), mesh_dim_names=("shard",))
    shape = (processes // shard_size, shard_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def _precision(model: Any, method: Method) -> MixedPrecisionPolicy:
    """Returns that float32 masters of 16-bit weights are gathered in 16 bit; their gradients are summed in float32."""
    wide = any(parameter.dtype == torch.float32 for parameter in method.trained_parameters().values())
    if not method.shards or not wide or model.dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=model.dtype, reduce_dtype=torch.float32)
