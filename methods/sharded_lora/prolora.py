"""PRoLoRA: each vector repeats one shard, rotated."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from finetune.methods.base import MethodConfig
from finetune.methods.registry import register
from finetune.methods.sharded_adapter import ShardedAdapter, ShardedAdapterConfig

__all__ = ["PRoLoRA", "PRoLoRAConfig"]


class PRoLoRAConfig(ShardedAdapterConfig):
    """How vectors repeat."""

    r: int = Field(default=16, ge=1, description="Rank of each layer's update.")
    unshared_rank: int = Field(default=2, ge=0, description="Vectors that repeat nothing.")
    num_shards: int = Field(default=4, ge=1, description="Repeats of a shard in a vector of the first factor.")
    num_shards_b: int | None = Field(default=None, ge=1, description="Repeats in the second; null: as many.")

    @model_validator(mode="after")
    def _ranks_fit(self) -> PRoLoRAConfig:
        if self.unshared_rank > self.r:
            raise ValueError(f"unshared_rank {self.unshared_rank} is more than r {self.r}")
        return self


@register("prolora")
class PRoLoRA(ShardedAdapter):
    """Partially rotated low-rank adaptation: layers share nothing, but within a layer a vector repeats one shard.

    Of the r vectors, all but ``unshared_rank`` consist of ``num_shards`` shards of which slot c of vector i is shard
    ``(i + c * shift) mod (r - u)``: parameters per layer ``(r - u) (a / m + b / n) + u (a + b)``.

    References:
        Wang et al., "PRoLoRA: Partial Rotation Empowers More Parameter-Efficient LoRA", arXiv 2402.16902, section 3.
    """

    paper: ClassVar[str] = "arXiv 2402.16902"
    Config: ClassVar[type[MethodConfig]] = PRoLoRAConfig
    config: PRoLoRAConfig
    sharing: ClassVar[Any] = "prolora"
