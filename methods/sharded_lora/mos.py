"""MoS: LoRA's parameters as shards in pools that all layers draw from."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from finetune.methods.base import MethodConfig
from finetune.methods.registry import register
from finetune.methods.sharded_adapter import ShardedAdapter, ShardedAdapterConfig

__all__ = ["MoS", "MoSConfig"]


class MoSConfig(ShardedAdapterConfig):
    """How the parameters are cut and dealt."""

    r: int = Field(default=16, ge=1, description="Rank of each layer's update: what it costs in time.")
    equiv_rank: int = Field(default=8, ge=1, description="Rank of the plain LoRA with as many trained parameters.")
    private_rank: int = Field(
        default=2, ge=0, description="Vectors of each layer that no other uses; 0 shares all of them."
    )
    num_shards: int = Field(default=4, ge=1, description="Shards per vector, a divisor of all widths; 1: whole.")
    dealing: Literal["balanced", "random"] = Field(
        default="balanced",
        description="balanced: every shard is used; random: as published, some are used by no layer and never train.",
    )
    dissociated: bool = Field(
        default=True, description="Whether the two factors are dealt apart; false: both get the same numbers."
    )

    @model_validator(mode="after")
    def _ranks_fit(self) -> MoSConfig:
        if not self.private_rank <= self.equiv_rank <= self.r:
            raise ValueError(
                f"private_rank {self.private_rank} <= equiv_rank {self.equiv_rank} <= r {self.r} does not hold"
            )
        if self.private_rank == self.equiv_rank != self.r:
            raise ValueError(f"where all is private, r is equiv_rank ({self.equiv_rank}), not {self.r}")
        return self


@register("mos")
class MoS(ShardedAdapter):
    """Mixture of Shards: each layer's vectors are put together from shards of a pool, some of them its own.

    A layer of rank r takes r vectors of ``num_shards`` shards; the pool of the layers of one kind has as many
    parameters as plain LoRA of rank ``equiv_rank``. The four strategies that tell layers apart have a switch each: a
    choice per layer (``pure_sharing`` is without), ``dissociated``, ``num_shards``, ``private_rank``.

    References:
        Wang et al., "MoS: Unleashing Parameter Efficiency of Low-Rank Adaptation with Mixture of Shards",
        arXiv 2410.00938, section 3.
    """

    paper: ClassVar[str] = "arXiv 2410.00938"
    Config: ClassVar[type[MethodConfig]] = MoSConfig
    config: MoSConfig
    sharing: ClassVar[Any] = "mos"
