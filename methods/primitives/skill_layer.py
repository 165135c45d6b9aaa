"""A linear layer with a low-rank update that is mixed, task by task, from skills.

``A_t = concat_s sum_k w_t[s, k] A[s, k]``, ``B_t`` alike, ``y = base(x) + (alpha / r) (x A_t) B_t``: the factors are
mixed before they are multiplied (Caccia et al., arXiv 2211.03831, section 3).
"""

# Legend: T tokens, a in_features, b out_features, r rank, S splits, K skills, U tasks of a batch, N rows of a batch

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.core.errors import TrainingError
from finetune.methods.primitives.low_rank_layer import LowRankLayer, product_dtype

__all__ = ["LinearSkills"]


class LinearSkills(LowRankLayer):
    """Wraps a ``nn.Linear`` or ``Conv1D``; the tuner owns the router and says how the skills are mixed.

    Attributes:
        mhr_a: Adapter -> the skills' first factors, (S, K, a / S, r).
        mhr_b: Adapter -> their second factors, (S, K, b / S, r).
        mhr_places: Adapter -> number of this layer's router among all.
    """

    adapter_layer_names = ("mhr_a", "mhr_b", "mhr_router")
    other_param_names = ("mhr_known", "mhr_dropout", "mhr_places", "r", "scaling")

    def __init__(self, base_layer: nn.Module, owner: Any) -> None:
        super().__init__(base_layer, owner)
        self.mhr_a, self.mhr_b = nn.ParameterDict({}), nn.ParameterDict({})
        self.mhr_dropout = nn.ModuleDict({})
        self.mhr_places: dict[str, int] = {}

    @property
    def mhr_router(self) -> nn.ParameterDict:
        """The routers' logits, by adapter: float32 (tasks, routers, S, K)."""
        return cast(nn.ParameterDict, self.owner.mhr_router)

    @property
    def mhr_known(self) -> Any:
        """Logits of tasks that train no more, by adapter, as :attr:`mhr_router`."""
        return self.owner.mhr_known

    def update_layer(
        self,
        adapter: str,
        skills: tuple[Tensor, Tensor],
        place: int,
        *,
        alpha: float,
        dropout: float,
        train_skills: bool,
        inference_mode: bool,
    ) -> None:
        """Adds an adapter whose router the tuner has made.

        Args:
            adapter: Its name.
            skills: The first and second factors, as :attr:`mhr_a` and :attr:`mhr_b`.
            place: Number of this layer's router.
            alpha: The update is multiplied by ``alpha / r``.
            dropout: Of the adapter's input.
            train_skills: Whether the factors train, or the router alone.
            inference_mode: Whether nothing of it trains.
        """
        self.mhr_a[adapter], self.mhr_b[adapter] = (nn.Parameter(factor) for factor in skills)
        self.r[adapter] = skills[0].shape[-1]
        self.scaling[adapter], self.mhr_places[adapter] = alpha / self.r[adapter], place
        self.mhr_dropout[adapter] = nn.Dropout(dropout) if dropout else nn.Identity()
        if not train_skills:
            self.frozen_peft_weight_names = {**self.frozen_peft_weight_names, adapter: ("mhr_a", "mhr_b")}
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the base layer's output with the updates that the active adapters have for each row's task."""
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
        weights_USK, inverse_N = self.owner.mixing(adapter, self.mhr_places[adapter])
        first_Uar, second_Ubr = (
            _mix(self.mhr_a[adapter], weights_USK).to(dtype),
            _mix(self.mhr_b[adapter], weights_USK).to(dtype),
        )
        x = self.mhr_dropout[adapter](x).to(dtype)
        if len(first_Uar) == 1:
            return F.linear((x @ first_Uar[0]) * self.scaling[adapter], second_Ubr[0])
        # Whatever lies between a row and its numbers (beams, experts' flattened tokens), the rows come first.
        inverse_N = inverse_N.to(x.device)
        if len(x) % len(inverse_N):
            raise TrainingError(
                "a layer does not see all rows of the batch, so it cannot tell their tasks apart",
                where="method.target_modules",
                got=f"{len(x)} rows of {len(inverse_N)}",
                fix="method.exclude_modules: the layer, such as an expert that sees some tokens only",
            )
        x_NTa = x.reshape(len(inverse_N), -1, self.in_features)
        z_NTr = torch.bmm(x_NTa, first_Uar[inverse_N]) * self.scaling[adapter]
        return torch.bmm(z_NTr, second_Ubr[inverse_N].mT).reshape(*x.shape[:-1], self.out_features)

    @torch.no_grad()
    def plain_factors(self, adapter: str) -> tuple[Tensor, Tensor]:
        """Returns A (r, a) and B (b, r) of the one task that the tuner serves now, float32."""
        weights_1SK = self.owner.mixing_of_one(adapter, self.mhr_places[adapter])
        first, second = (_mix(factor.float(), weights_1SK)[0] for factor in (self.mhr_a[adapter], self.mhr_b[adapter]))
        return first.t(), second

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        # The router is the tuner's, and other layers use it: it stays where it is.
        target = device or next(self.get_base_layer().parameters()).device
        for held in (self.mhr_a, self.mhr_b):
            if held[adapter_name].device != target and not held[adapter_name].is_meta:
                held[adapter_name] = nn.Parameter(held[adapter_name].to(target))


def _mix(skills_SKcr: Tensor, weights_USK: Tensor) -> Tensor:
    """Returns each task's factor (U, S c, r): in every split the skills' sum with the task's weights."""
    splits, skills, width, r = skills_SKcr.shape
    if skills == 1:
        return skills_SKcr.view(1, splits * width, r)
    weights_SUK = weights_USK.to(skills_SKcr).transpose(0, 1)
    with torch.autocast(skills_SKcr.device.type, enabled=False):
        mixed_SUc = torch.bmm(weights_SUK, skills_SKcr.flatten(2))
    return mixed_SUc.transpose(0, 1).reshape(-1, splits * width, r)
