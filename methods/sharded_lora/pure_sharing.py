"""Pure sharing: all layers use one pool of whole vectors."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from finetune.methods.base import MethodConfig
from finetune.methods.registry import register
from finetune.methods.sharded_adapter import ShardedAdapter, ShardedAdapterConfig

__all__ = ["PureSharing", "PureSharingConfig"]


class PureSharingConfig(ShardedAdapterConfig):
    """What is shared."""

    equiv_rank: int = Field(default=2, ge=1, description="Rank of the plain LoRA with as many trained parameters.")
    r: int | None = Field(
        default=None,
        ge=1,
        description="Vectors of its own choice that each layer takes; null: the whole pool.",
    )
    random_scaling: float | None = Field(
        default=None, gt=0, description="Standard deviation around 1 of frozen factors per layer and rank; null: none."
    )


@register("pure_sharing")
class PureSharing(ShardedAdapter):
    """All layers of a kind use the same vectors: a pool of ``equiv_rank`` times the number of layers, whole.

    The ablation from which MoS starts: ``random_scaling`` multiplies each rank of a layer by a frozen factor, ``r``
    gives each layer a choice of its own.

    References:
        Wang et al., "MoS: Unleashing Parameter Efficiency of Low-Rank Adaptation with Mixture of Shards",
        arXiv 2410.00938, section 2.
    """

    paper: ClassVar[str] = "arXiv 2410.00938"
    Config: ClassVar[type[MethodConfig]] = PureSharingConfig
    config: PureSharingConfig
    sharing: ClassVar[Any] = "pure"

    def _derived(self) -> dict[str, Any]:
        return {"subset": self.config.r is not None, "r": self.config.r or self.config.equiv_rank}
