"""Base of the methods whose low-rank factors are gathered from pools that layers share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field

from finetune.methods.adapters.peft_tuner import PeftTuner
from finetune.methods.base import MethodConfig

if TYPE_CHECKING:
    from finetune.methods.primitives.shard_layer import LinearShards

__all__ = ["ShardedAdapter", "ShardedAdapterConfig"]


class ShardedAdapterConfig(MethodConfig):
    """What all methods share whose factors are gathered from pools."""

    alpha: float = Field(default=16, gt=0, description="The update is multiplied by alpha over the layer's rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout of the adapter's input.")
    target_modules: list[str] | str = Field(
        default="all-linear", description="Names of the layers that are adapted, or a regular expression, as PEFT's."
    )
    exclude_modules: list[str] | str | None = Field(default=None, description="Layers to leave out, as PEFT's.")
    layers_to_transform: list[int] | int | None = Field(default=None, description="Numbers of layers, as PEFT's.")
    modules_to_save: list[str] | None = Field(default=None, description="Modules that train whole besides, as PEFT's.")
    seed: int = Field(default=0, description="Seed of the pools and of who gets which shard.")


class ShardedAdapter(PeftTuner):
    """Adds ``s B A`` to linear layers, A and B laid out from rows of pools that layers of one name and shape share.

    Costs what LoRA of rank r costs; trains and saves the pools, float32 over a 16-bit base, and the plan, 32-bit
    numbers that never train. Exports to stock LoRA exactly.
    """

    Config: ClassVar[type[MethodConfig]] = ShardedAdapterConfig
    config: ShardedAdapterConfig
    # The tuner is ours and says itself what is wrong; only what PEFT says of targets comes as a ValueError.
    refuses_by: ClassVar[tuple[type[Exception], ...]] = (ValueError,)
    stock: ClassVar[bool] = False
    sharing: ClassVar[str]

    def _peft_type(self) -> Any:
        from finetune.methods.primitives.shard_tuner import SHARDS

        return SHARDS

    def _peft_config(self, found: Mapping[str, Any]) -> Any:
        from finetune.methods.primitives.shard_tuner import ShardsConfig

        given = {**dict(self.config), "sharing": self.sharing, **self._derived(), **found}
        return ShardsConfig(task_type="CAUSAL_LM", **given)

    def _derived(self) -> dict[str, Any]:
        """Returns fields of the tuner's config that follow from this method's."""
        return {}

    def _layers(self) -> dict[str, LinearShards]:
        from finetune.methods.primitives.shard_layer import LinearShards

        model = cast(Any, self.model).base_model.model
        return {name: layer for name, layer in model.named_modules() if isinstance(layer, LinearShards)}

    def export_adapter(self, folder: str | Path) -> None:
        """Writes the laid-out factors as a stock LoRA adapter; the update is the same, bit for bit."""
        from finetune.methods.primitives.lora_export import write_lora

        write_lora(Path(folder), self._layers(), self.config.alpha, base_model=str(self.metadata()["base_model"]))

    def _chosen(self) -> tuple[str, ...]:
        from finetune.methods.primitives.shard_layer import unused_shards

        unused, rows = unused_shards(self._layers().values())
        dead = (f"{unused:,} of {rows:,} shards are used by no layer, and never train",) if unused else ()
        return (*super()._chosen(), *dead)
