"""Which layers a config of PEFT targets, before PEFT replaces them."""

from __future__ import annotations

from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer, _ExcludedModule, _maybe_include_all_linear_layers
from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune.core.errors import TargetError

__all__ = ["targeted_layers"]


def targeted_layers(tuner: Any, model: nn.Module, config: Any) -> dict[str, nn.Module]:
    """Returns the plain layers that ``config`` targets, by name, in the model's order.

    Args:
        tuner: A ``BaseTuner``, which says what its patterns match.
        model: The model that it adapts, perhaps with earlier adapters.
        config: The adapter's config, prepared.

    Raises:
        TargetError: One is no linear layer.
    """
    config = _maybe_include_all_linear_layers(config, model)
    inside: list[str] = []
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not name or any(name.startswith(outer) for outer in inside):
            continue
        if isinstance(module, BaseTunerLayer):
            inside.append(f"{name}.")
        matched = tuner._check_target_module_exists(config, name)
        if not matched or isinstance(matched, _ExcludedModule):
            continue
        layer: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        if not isinstance(layer, nn.Linear | Conv1D):
            raise TargetError(
                f"{name} is a {type(layer).__name__}",
                where="method.target_modules",
                want="torch.nn.Linear or Conv1D",
            )
        found[name] = layer
    return found
