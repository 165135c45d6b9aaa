"""The PEFT tuner of MoSA: draws the experts of every pass, and adds the divergence of two passes to the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune.core.errors import TargetError, TrainingError
from finetune.methods.primitives.expert_draw import DRAW, Draw, ForwardCount
from finetune.methods.primitives.mosa_layer import MosaLinear
from finetune.methods.primitives.peft_registration import register_tuner
from finetune.methods.primitives.two_passes import two_passes

__all__ = ["MOSA", "MosaConfig", "MosaTuner"]


@dataclass
class MosaConfig(PeftConfig):
    """Settings of a LoRA whose factors consist of sparse experts.

    Attributes:
        r: Rank of each layer's update.
        n_experts: Into how many experts the entries of a factor are dealt.
        split: ``up``, ``down`` or ``both``: the second factor, the first, or both consist of experts.
        gamma: Weight of the divergence between two passes; 0: one pass.
        beta: Weight of the second pass's own loss.
        alpha: The update is multiplied by ``alpha / r``.
        dropout: Of the adapter's input.
        seed: Of the first factor, of the dealing and of the draws.
        target_modules: As PEFT's.
        exclude_modules: As PEFT's.
        modules_to_save: As PEFT's.
        layers_to_transform: As PEFT's.
        layers_pattern: As PEFT's.
    """

    r: int = 16
    n_experts: int = 4
    split: str = "up"
    gamma: float = 1.0
    beta: float = 0.0
    alpha: float = 16
    dropout: float = 0.0
    seed: int = 0
    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type = MOSA
        if self.split not in ("up", "down", "both"):
            raise ValueError(f"split is up, down or both, not {self.split!r}")
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, set(getattr(self, name)))


class MosaTuner(BaseTuner):
    """Counts the training forwards of each adapter, from which the experts follow."""

    prefix: str = "mosa_"
    tuner_layer_cls = MosaLinear
    target_module_mapping: Any = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    # Layers without this tuner would draw nothing: PEFT refuses to inject them alone.
    uses_shared_state = True

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Starts the adapter's count, then lets PEFT replace the layers."""
        if adapter_name in self.prefix:
            raise ValueError(f"{adapter_name!r} is no name for an adapter: it is a part of {self.prefix!r}")
        if "mosa_forwards" not in self._modules:
            self.mosa_forwards = nn.ModuleDict({})
        self.mosa_forwards[adapter_name] = ForwardCount()
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    def _create_and_replace(  # type: ignore[override]
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **kwargs: Any,
    ) -> None:
        layer: Any = target
        if not isinstance(target, MosaLinear):
            if not isinstance(target, nn.Linear | Conv1D):
                raise TargetError(
                    f"{current_key} is a {type(target).__name__}",
                    where="method.target_modules",
                    want="torch.nn.Linear or Conv1D",
                )
            layer = MosaLinear(target, self, current_key)
        inference_mode = peft_config.inference_mode or adapter_name not in self.active_adapters
        layer.update_layer(adapter_name, peft_config, inference_mode=inference_mode)
        if layer is not target:
            self._replace_module(parent, target_name, layer, target)

    def delete_adapter(self, adapter_name: str) -> None:
        """Deletes an adapter and its count."""
        super().delete_adapter(adapter_name)
        del self.mosa_forwards[adapter_name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; with labels in training, twice where the settings say so, and the loss is that of both.

        Returns:
            What the model returns; its logits are those of the first pass.

        Raises:
            TrainingError: ``DataParallel`` runs this, whose replicas forget what they count.
        """
        self.seen_outside_backward = False
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        if getattr(self, "_is_replica", False):
            raise TrainingError(
                "torch.nn.DataParallel trains replicas, which forget which experts they drew",
                fix="one process per device: torchrun, or accelerate launch",
            )
        configs: dict[str, Any] = {name: self.peft_config[name] for name in self.active_adapters}
        seeds = {name: config.seed for name, config in configs.items()}
        counts = {name: self._next_forward(name) for name in configs}

        def run(number: int, **given: Any) -> Any:
            with DRAW.during(self.model, Draw(seeds, counts, number)):
                return self.model(*args, **given)

        weights = [(config.beta, config.gamma) for config in configs.values() if config.beta or config.gamma]
        if not weights or kwargs.get("labels") is None:
            return run(0, **kwargs)
        beta, gamma = weights[0]
        return two_passes(run, self.model, kwargs, beta=beta, gamma=gamma)

    def _next_forward(self, adapter: str) -> int:
        """Counts one more training forward of an adapter, and returns how many there were before."""
        count: Any = self.mosa_forwards[adapter]
        count.value += 1
        return int(count.value) - 1


MOSA = register_tuner("mosa", MosaConfig, MosaTuner)
