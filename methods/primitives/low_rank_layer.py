"""Base of the layers that add a low-rank update ``s B A`` to a linear one: merging, conversion, recomputation."""

# Legend: a in_features, b out_features, r rank

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from finetune.core.errors import TrainingError
from finetune.methods.primitives.process_group import processes
from finetune.methods.primitives.projections import in_features, out_features

__all__ = ["LowRankLayer", "product_dtype"]


class LowRankLayer(nn.Module, BaseTunerLayer):
    """Wraps a ``nn.Linear`` or ``Conv1D``; a tuner owns what its layers share.

    Args:
        base_layer: The layer, which may be wrapped already.
        owner: The tuner; its ``seen_outside_backward`` is False at the start of each forward pass.
    """

    def __init__(self, base_layer: nn.Module, owner: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        # In a tuple, the tuner is no submodule of its own layer.
        self._owner = (owner,)
        self._disable_adapters = False
        self.merged_adapters = []
        self.r: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        layer = self.get_base_layer()
        self.in_features, self.out_features = in_features(layer), out_features(layer)

    @property
    def owner(self) -> Any:
        """The tuner."""
        return self._owner[0]

    @abstractmethod
    def plain_factors(self, adapter: str) -> tuple[Tensor, Tensor]:
        """Returns A (r, a) and B (b, r) of an adapter, float32, of which the scaled product is the update."""

    @torch.no_grad()
    def get_delta_weight(self, adapter: str) -> Tensor:
        """Returns the change of the weight, float32, as the base layer stores it."""
        first, second = self.plain_factors(adapter)
        delta = self.scaling[adapter] * (second @ first)
        return delta.t() if isinstance(self.get_base_layer(), Conv1D) else delta

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds the change to the base's weight, in float32, rounded once."""
        for adapter in check_adapters_to_merge(self, adapter_names):
            if adapter in self.r:
                self._add(adapter, 1.0, safe=safe_merge)
                self.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        """Subtracts the changes that were merged; exact but for the rounding of the base's dtype."""
        while self.merged_adapters:
            self._add(self.merged_adapters.pop(), -1.0, safe=False)

    @torch.no_grad()
    def _add(self, adapter: str, sign: float, *, safe: bool) -> None:
        weight = cast(Tensor, self.get_base_layer().weight)
        merged = (weight.float() + sign * self.get_delta_weight(adapter)).to(weight.dtype)
        if safe and not bool(torch.isfinite(merged).all()):
            raise ValueError(f"NaNs detected in the merged weights. The adapter {adapter} seems to be broken")
        weight.copy_(merged)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Returns whether PEFT can turn the update into LoRA's: always."""
        return True

    def _refuse_nested_backward(self) -> None:
        """Refuses reentrant recomputation with several processes: averaging would stop after the first segment."""
        if processes() == 1 or not (self.owner.training and torch.is_grad_enabled()):
            return
        if torch._C._current_graph_task_id() == -1:
            self.owner.seen_outside_backward = True
        elif not self.owner.seen_outside_backward:
            raise TrainingError(
                "activations are computed again by a nested backward pass, in which several processes would average "
                "the gradient of a shared parameter before all layers have added theirs",
                fix="gradient_checkpointing_kwargs={'use_reentrant': False}",
            )


def product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a matrix product of ``x`` is computed: autocast's, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
