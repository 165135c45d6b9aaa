"""A linear layer with a LoRA whose factors consist of sparse experts: training uses one of them, inference their mean.

``y = base(x) + s B_j A_i x``, where i and j are drawn anew for each pass (MoSA, arXiv 2312.02923, in its LoRA form).
"""

# Legend: a in_features, b out_features, r rank

from __future__ import annotations

import hashlib
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.core.errors import TrainingError
from finetune.methods.primitives.expert_draw import DRAW
from finetune.methods.primitives.low_rank_layer import LowRankLayer, product_dtype
from finetune.methods.primitives.sparse_experts import SparseExperts

__all__ = ["MosaLinear"]


class MosaLinear(LowRankLayer):
    """Wraps a ``nn.Linear`` or ``Conv1D``.

    Attributes:
        mosa_a: Adapter -> experts of the first factor (r, a).
        mosa_b: Adapter -> those of the second (b, r), which begins at zero.
    """

    adapter_layer_names = ("mosa_a", "mosa_b")
    other_param_names = ("r", "scaling", "mosa_dropout")

    def __init__(self, base_layer: nn.Module, owner: Any, name: str) -> None:
        super().__init__(base_layer, owner)
        self.name = name
        self.mosa_a, self.mosa_b, self.mosa_dropout = nn.ModuleDict({}), nn.ModuleDict({}), nn.ModuleDict({})

    def update_layer(self, adapter: str, config: Any, *, inference_mode: bool) -> None:
        """Adds an adapter.

        Args:
            adapter: Its name.
            config: A ``MosaConfig``.
            inference_mode: Whether nothing of it trains.

        Raises:
            ConfigError: There are more experts than entries of a factor to deal.
        """
        # Of the layer's own name: what it begins with does not depend on which others are adapted.
        key = hashlib.sha256(f"{config.seed} {self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        bound = self.in_features**-0.5
        first = torch.empty(config.r, self.in_features).uniform_(-bound, bound, generator=generator)
        second = torch.zeros(self.out_features, config.r)
        down, up = (config.n_experts if config.split in (side, "both") else 1 for side in ("down", "up"))
        self.r[adapter], self.scaling[adapter] = config.r, config.alpha / config.r
        self.mosa_a[adapter] = SparseExperts(first, down, generator)
        self.mosa_b[adapter] = SparseExperts(second, up, generator)
        self.mosa_dropout[adapter] = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self._move_adapter_to_device_of_base_layer(adapter)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def plain_factors(self, adapter: str) -> tuple[Tensor, Tensor]:
        """Returns the mean over the experts: A (r, a) and B (b, r), float32."""
        return self._experts("a", adapter).merged(), self._experts("b", adapter).merged()

    def _experts(self, factor: str, adapter: str) -> SparseExperts:
        return cast(SparseExperts, (self.mosa_a if factor == "a" else self.mosa_b)[adapter])

    def _factors(self, adapter: str) -> tuple[Tensor, Tensor]:
        """Returns A and B of the pass that is under way, or the mean over the experts outside of any.

        Raises:
            TrainingError: A pass trains, and nobody knows which it is.
        """
        draw = DRAW.get()
        if draw is None:
            if self.training and torch.is_grad_enabled():
                raise TrainingError(
                    "a layer of MoSA trains in a forward pass whose experts nobody has drawn",
                    where=self.name,
                    want="a call of the PEFT model; activations computed again by transformers' own checkpointing",
                    fix="model.gradient_checkpointing_enable() in place of a wrapper that checkpoints, and "
                    "model(...) in place of model.get_base_model()(...)",
                )
            return self.plain_factors(adapter)
        drawn = []
        for factor in ("a", "b"):
            experts = self._experts(factor, adapter)
            drawn.append(experts.drawn(draw.expert(adapter, f"{self.name} {factor}", experts.experts)))
        return drawn[0], drawn[1]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the base layer's output with the updates of the active adapters."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return y
        for adapter in self.active_adapters:
            if adapter in self.r:
                y = y + self._update(adapter, x).to(y.dtype)
        return y

    def _update(self, adapter: str, x: Tensor) -> Tensor:
        self._refuse_nested_backward()
        dtype = product_dtype(x)
        first, second = (factor.to(dtype) for factor in self._factors(adapter))
        z = F.linear(self.mosa_dropout[adapter](x).to(dtype), first)
        return F.linear(z * self.scaling[adapter], second)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        # To the device only: the values stay float32 over a 16-bit base.
        target = device or next(self.get_base_layer().parameters()).device
        for held in (self.mosa_a, self.mosa_b):
            if adapter_name in held and not any(p.is_meta for p in held[adapter_name].parameters()):
                held[adapter_name].to(target)
