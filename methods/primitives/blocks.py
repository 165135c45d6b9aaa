"""The transformer blocks of a causal LM, found by structure."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["final_norm_names", "find_blocks"]


def find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """Returns the name and the list of the transformer blocks: the outermost list with one entry per layer.

    Raises:
        LookupError: There is none.
    """
    layers = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return name, module
    raise LookupError(f"{type(model).__name__} has no list of {layers} blocks")


def final_norm_names(model: Any, blocks: str) -> list[str]:
    """Returns the parameters of the norms that stand beside the list ``blocks``: the one after the last block.

    Norms over the embeddings, where a model has them, come before the list and are left out.
    """
    parent_name, _, own = blocks.rpartition(".")
    names: list[str] = []
    after = False
    for name, module in model.get_submodule(parent_name).named_children():
        if after and "norm" in type(module).__name__.lower():
            names += [f"{parent_name}.{name}.{parameter}".lstrip(".") for parameter, _ in module.named_parameters()]
        after = after or name == own
    return names
