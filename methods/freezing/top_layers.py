"""Trains the transformer layers nearest to the output."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from finetune.core.errors import FinetuneWarning, TargetError
from finetune.methods.base import MethodConfig
from finetune.methods.registry import register
from finetune.methods.whole_tensors import WholeTensors, WholeTensorsConfig

if TYPE_CHECKING:
    from torch import nn

__all__ = ["TopLayers", "TopLayersConfig"]


class TopLayersConfig(WholeTensorsConfig):
    """Which of the parameters near the output train."""

    count: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.25,
        description="Number of top transformer layers, or their share of all layers in (0, 1), at least one.",
    )
    norm: bool = Field(default=True, description="Whether the norm after the last layer trains too.")
    head: bool = Field(
        default=False,
        description="Whether the output head trains too; with tied embeddings it is the embedding as well.",
    )


@register("top_layers")
class TopLayers(WholeTensors):
    """Trains the layers nearest to the output; nothing below them keeps activations or gets gradients.

    ``W <- W - optimizer(dL/dW)`` for every tensor of the top ``count`` layers, and of the final norm and the head where
    asked for. The backward pass ends at the lowest trained layer, so time and activations shrink with ``count``.

    References:
        Lee et al., "What Would Elsa Do? Freezing Layers During Transformer Fine-Tuning", arXiv 1911.03090.
    """

    paper: ClassVar[str] = "arXiv 1911.03090"
    Config: ClassVar[type[MethodConfig]] = TopLayersConfig
    config: TopLayersConfig

    def choose(self, model: nn.Module, candidates: frozenset[str]) -> Sequence[str]:
        """Returns the parameters of the top layers, and of the final norm and the head where asked for."""
        from finetune.methods.primitives.blocks import final_norm_names, find_blocks

        try:
            place, blocks = find_blocks(model)
        except LookupError as error:
            raise TargetError("top_layers finds no transformer layers", got=str(error)) from error
        wanted: set[str] = set()
        for number in range(len(blocks) - self._number(len(blocks)), len(blocks)):
            wanted.update(f"{place}.{number}.{name}" for name, _ in blocks[number].named_parameters())
        if self.config.norm:
            wanted.update(final_norm_names(model, place))
        if self.config.head:
            wanted.update(self._head_names(model))
        return [name for name, _ in model.named_parameters() if name in wanted and name in candidates]

    def _number(self, layers: int) -> int:
        count = self.config.count
        if isinstance(count, float):
            return max(1, round(count * layers))
        if count > layers:
            raise TargetError(
                f"the model has {layers} layers",
                where="method.count",
                got=str(count),
                want=f"1 to {layers}, or a share in (0, 1)",
            )
        return count

    def _head_names(self, model: nn.Module) -> list[str]:
        head = model.get_output_embeddings()  # type: ignore[operator]
        own = {id(parameter) for parameter in head.parameters()}
        names = [name for name, parameter in model.named_parameters() if id(parameter) in own]
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        if id(embedding) in own:
            warnings.warn(
                f"top_layers with head: true trains {names[0]}, which is the input embedding too: the tensor is tied, "
                "so every token's input changes and the backward pass goes through all layers; model.tied: untie gives "
                "the head its own copy",
                FinetuneWarning,
                stacklevel=2,
            )
        return names
