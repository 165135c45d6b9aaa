"""Base of the methods whose low-rank factors are gathered from pools that layers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic import Field

from finetune.methods.base import MethodConfig
from finetune.methods.low_rank_adapter import LowRankAdapter, LowRankAdapterConfig

if TYPE_CHECKING:
    from finetune.methods.primitives.shard_layer import LinearShards

__all__ = ["ShardedAdapter", "ShardedAdapterConfig"]


class ShardedAdapterConfig(LowRankAdapterConfig):
    """What all methods share whose factors are gathered from pools."""

    gather: Literal["layer", "model"] = Field(
        default="model",
        description="Whether training lays all layers' factors out at once when a pass begins, which is faster and "
        "holds them all, or layer by layer.",
    )


class ShardedAdapter(LowRankAdapter):
    """Adds ``s B A`` to linear layers, A and B laid out from rows of pools that layers of one name and shape share.

    Costs what LoRA of rank r costs; trains and saves the pools, float32 over a 16-bit base, and the plan, 32-bit
    numbers that never train.
    """

    Config: ClassVar[type[MethodConfig]] = ShardedAdapterConfig
    config: ShardedAdapterConfig
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

    def write_values(self) -> None:
        """Lets the layers forget the factors that they keep in evaluation."""
        for layer in cast("list[LinearShards]", list(self._layers().values())):
            layer.forget()

    def _chosen(self) -> tuple[str, ...]:
        from finetune.methods.primitives.shard_layer import unused_shards

        unused, rows = unused_shards(cast("list[LinearShards]", list(self._layers().values())))
        dead = (f"{unused:,} of {rows:,} shards are used by no layer, and never train",) if unused else ()
        return (*super()._chosen(), *dead)
