"""MoSA: a LoRA of sparse experts, of which training draws one per pass and inference uses the mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from finetune.methods.base import MethodConfig
from finetune.methods.low_rank_adapter import LowRankAdapter, LowRankAdapterConfig
from finetune.methods.registry import register

__all__ = ["MoSA", "MoSAConfig"]


class MoSAConfig(LowRankAdapterConfig):
    """How the entries are dealt, and what the loss is."""

    r: int = Field(default=16, ge=1, description="Rank of each layer's update.")
    n_experts: int = Field(default=4, ge=1, description="Experts that the entries of a factor are dealt to.")
    split: Literal["up", "down", "both"] = Field(
        default="up", description="Which factors consist of experts: up (B), down (A) or both; the others are dense."
    )
    gamma: float = Field(
        default=1.0,
        ge=0,
        description="Weight of the divergence between two passes of a step; with gamma and beta 0 there is one pass, "
        "at half the time.",
    )
    beta: float = Field(default=0.0, ge=0, description="Weight of the second pass's cross entropy.")


@register("mosa")
class MoSA(LowRankAdapter):
    """Mixture of Sparse Adapters: the entries of a LoRA's factors are dealt to experts, which train by turns.

    Each expert is the initial factor but for the entries that it owns. A training pass draws one expert per factor and
    layer; inference uses their mean, one plain LoRA, to which it exports exactly. Trains as many numbers as that LoRA,
    those of a split factor in one of ``n_experts`` passes. Two passes per step, whose divergence is a part of the loss,
    take twice LoRA's time; ``gamma: 0`` leaves one.

    Differences from the authors' code: an expert holds its own entries only, where theirs holds a copy of the matrix;
    the draws are a function of the seed and the step, the same in every process, after a resume and when activations
    are computed again; sets of equal size come from ranks, not from thresholds.

    References:
        Zhang et al., "MoSA: Mixture of Sparse Adapters for Visual Efficient Tuning", arXiv 2312.02923.
    """

    paper: ClassVar[str] = "arXiv 2312.02923"
    Config: ClassVar[type[MethodConfig]] = MoSAConfig
    config: MoSAConfig
    takes_turns: ClassVar[bool] = True

    def _peft_type(self) -> Any:
        from finetune.methods.primitives.mosa_tuner import MOSA

        return MOSA

    def _peft_config(self, found: Mapping[str, Any]) -> Any:
        from finetune.methods.primitives.mosa_tuner import MosaConfig

        return MosaConfig(task_type="CAUSAL_LM", **{**dict(self.config), **found})

    def at_rest(self) -> frozenset[str]:
        """Returns the experts that no pass of this step drew."""
        from finetune.methods.primitives.sparse_experts import SparseExperts

        matrices = ((name, m) for name, m in self.model.named_modules() if isinstance(m, SparseExperts))
        return frozenset(f"{name}.{own}" for name, matrix in matrices for own in matrix.resting())
