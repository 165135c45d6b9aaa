"""Sparse MeZO: only the small entries of each tensor move."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from finetune.methods.base import MethodConfig
from finetune.methods.registry import register
from finetune.methods.zeroth_order.mezo import Mezo, MezoConfig

__all__ = ["SparseMezo", "SparseMezoConfig"]


class SparseMezoConfig(MezoConfig):
    """Which entries move, and how."""

    sparsity: float = Field(
        default=0.75, gt=0, lt=1, description="Share of each tensor's entries, the largest ones, that stay as they are."
    )
    engine: Literal["copy", "onthefly"] = Field(
        default="onthefly",
        description="Where weights are perturbed: in a copy of all that trains, or in a buffer of one transformer "
        "block at a time. Not in place: the mask is read off the weights, which then would not be themselves.",
    )


@register("sparse_mezo")
class SparseMezo(Mezo):
    """MeZO along directions that are zero where a weight is large: ``m_i = [|W_i| <= h]``, ``z = m * z``.

    The threshold h of a tensor is the magnitude below which a share ``1 - sparsity`` of its entries lies when training
    starts; the mask is read off the unperturbed weights at every pass, and costs no memory. Large entries stay
    bit-identical, under weight decay too.

    References:
        Liu et al., "Sparse MeZO: Less Parameters for Better Performance in Zeroth-Order LLM Fine-Tuning",
        arXiv 2402.15751.
    """

    paper: ClassVar[str] = "arXiv 2402.15751"
    # An adapter begins with zeros, which have no large entries and no small ones.
    narrows_added: ClassVar[bool] = False
    narrows_entries: ClassVar[bool] = False
    Config: ClassVar[type[MethodConfig]] = SparseMezoConfig
    config: SparseMezoConfig

    def _limits(self) -> dict[str, float]:
        limits = {}
        for name, parameter in self._tensors.items():
            if parameter.is_meta:
                continue
            magnitudes = parameter.detach().abs().flatten()
            kept = max(1, round((1 - self.config.sparsity) * magnitudes.numel()))
            limits[name] = float(magnitudes.kthvalue(kept).values)
        return limits
