"""Masks by the size of the weights themselves: the largest, or the smallest (PaFi)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from finetune.methods.registry import register
from finetune.methods.selected_entries import SelectedEntries

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Magnitude", "PaFi"]


@register("magnitude")
class Magnitude(SelectedEntries):
    """Trains the largest weights of each tensor: needs no data, the mask is the same for every task.

    Each tensor gives the same share of its entries: those with the largest ``|W|``.

    References:
        "Super-Tuning" as PEFT ships it (``supertuning``), trained here without a copy of the weights.
    """

    def choose(self, scope: dict[str, nn.Parameter], budget: int) -> dict[str, Tensor]:
        """Returns the largest of each tensor."""
        from finetune.methods.primitives.entry_choice import even_quotas, top_per_tensor

        quotas = even_quotas({name: weight.numel() for name, weight in scope.items()}, budget)
        sizes = ((name, weight.detach().abs().float().reshape(-1)) for name, weight in scope.items())
        return top_per_tensor(sizes, quotas)


@register("pafi")
class PaFi(SelectedEntries):
    """Trains the smallest weights of the whole scope: needs no data, the mask is the same for every task.

    The ``budget`` entries with the smallest ``|W|`` over all tensors together.

    References:
        Liao et al., "Parameter-Efficient Fine-Tuning without Introducing New Latency", arXiv 2305.16742, section 3.1.
    """

    paper: ClassVar[str] = "arXiv 2305.16742"

    def choose(self, scope: dict[str, nn.Parameter], budget: int) -> dict[str, Tensor]:
        """Returns the smallest of all."""
        from finetune.methods.primitives.entry_choice import top_overall

        sizes = ((name, -weight.detach().abs().float().reshape(-1)) for name, weight in scope.items())
        return top_overall(sizes, {name: weight.numel() for name, weight in scope.items()}, budget)
