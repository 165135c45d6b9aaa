"""BitFit: only biases train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from finetune.core.errors import TargetError
from finetune.methods.registry import register
from finetune.methods.whole_tensors import WholeTensors

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BitFit"]


@register("bitfit")
class BitFit(WholeTensors):
    """Trains the bias vectors that the model has, and nothing else.

    ``b <- b - optimizer(dL/db)`` for every parameter whose name ends in ``.bias``, those of norms included. A bias is
    told by its name: norm weights are vectors too. Memory and saved size: a few thousandths of the model.

    References:
        Ben Zaken et al., "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked Language-models",
        arXiv 2106.10199, section 3.
    """

    paper: ClassVar[str] = "arXiv 2106.10199"

    def choose(self, model: nn.Module, candidates: frozenset[str]) -> Sequence[str]:
        """Returns the candidates whose name ends in ``.bias``."""
        biases = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
        if not biases:
            raise TargetError(
                f"{type(model).__name__} has no biases, so bitfit has nothing to train",
                where="method.name",
                got="0 parameters whose name ends in .bias",
                fix="method.name: ln_tuning (the norms' weights) or beft (adds bias vectors)",
            )
        return [name for name in biases if name in candidates]
