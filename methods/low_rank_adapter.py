"""Base of the methods of ours that add a low-rank update through a tuner of ours, which PEFT takes for its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from finetune.methods.adapters.peft_tuner import PeftTuner
from finetune.methods.base import MethodConfig

if TYPE_CHECKING:
    from finetune.methods.primitives.low_rank_layer import LowRankLayer

__all__ = ["LowRankAdapter", "LowRankAdapterConfig"]


class LowRankAdapterConfig(MethodConfig):
    """What all methods share that add a low-rank update."""

    alpha: float = Field(default=16, gt=0, description="The update is multiplied by alpha over the layer's rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout of the adapter's input.")
    target_modules: list[str] | str = Field(
        default="all-linear", description="Names of the layers that are adapted, or a regular expression, as PEFT's."
    )
    exclude_modules: list[str] | str | None = Field(default=None, description="Layers to leave out, as PEFT's.")
    layers_to_transform: list[int] | int | None = Field(default=None, description="Numbers of layers, as PEFT's.")
    modules_to_save: list[str] | None = Field(default=None, description="Modules that train whole besides, as PEFT's.")
    seed: int = Field(default=0, description="Seed of everything random in the adapter.")


class LowRankAdapter(PeftTuner):
    """Adds ``s B A`` to linear layers; a subclass says where the factors come from. Exports to stock LoRA exactly."""

    Config: ClassVar[type[MethodConfig]] = LowRankAdapterConfig
    config: LowRankAdapterConfig
    # The tuners are ours and say themselves what is wrong; only what PEFT says of targets comes as a ValueError.
    refuses_by: ClassVar[tuple[type[Exception], ...]] = (ValueError,)
    stock: ClassVar[bool] = False

    def _layers(self) -> dict[str, LowRankLayer]:
        """Returns the adapted layers by their name in the base."""
        from finetune.methods.primitives.lora_export import low_rank_layers

        return low_rank_layers(self.model)

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the factors of each layer, wherever they come from, and what trains whole besides."""
        shapes = {}
        for name, layer in self._layers().items():
            (rank,) = layer.r.values()
            shapes[f"{name}.lora_A.weight"] = (rank, layer.in_features)
            shapes[f"{name}.lora_B.weight"] = (layer.out_features, rank)
        whole = {name: shape for name, shape in super().trained_shapes().items() if "modules_to_save" in name}
        return {**shapes, **whole}

    def export_adapter(self, folder: str | Path) -> None:
        """Writes the plain factors as a stock LoRA adapter; the update is the same, bit for bit."""
        from finetune.methods.primitives.lora_export import write_lora

        write_lora(Path(folder), self._layers(), self.config.alpha, base_model=str(self.metadata()["base_model"]))
