"""The blocks of a model: what is brought in and computed as one."""

from __future__ import annotations

from typing import Any

from torch import nn

from finetune.core.errors import CapabilityError

__all__ = ["find_blocks"]


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks of a transformers model by name, in the order in which they are computed.

    A block is an element of a ``ModuleList`` of the class that the model names as one not to be split.

    Raises:
        CapabilityError: There is no such list.
    """
    classes: Any = getattr(model, "_no_split_modules", None) or ()
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    blocks = {
        f"{name}.{position}": block
        for name, found in lists.items()
        for position, block in enumerate(found)
        if type(block).__name__ in classes
    }
    if not blocks:
        raise CapabilityError(
            "the model does not say what its blocks are, so they cannot be streamed",
            where=f"{type(model).__name__}._no_split_modules",
            got=f"{', '.join(classes) or 'nothing'}; it has the lists {', '.join(lists) or 'none'}",
            fix="engine.offload.weights: none",
        )
    return blocks
