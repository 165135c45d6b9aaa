"""MoSA: a LoRA of sparse experts, of which training draws one per pass and inference uses the mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic import Field

from finetune.methods.adapters.peft_tuner import PeftTuner
from finetune.methods.base import MethodConfig
from finetune.methods.registry import register

if TYPE_CHECKING:
    from finetune.methods.primitives.mosa_layer import MosaLinear

__all__ = ["MoSA", "MoSAConfig"]


class MoSAConfig(MethodConfig):
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
    alpha: float = Field(default=16, gt=0, description="The update is multiplied by alpha over r.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout of the adapter's input.")
    target_modules: list[str] | str = Field(
        default="all-linear", description="Names of the layers that are adapted, or a regular expression, as PEFT's."
    )
    exclude_modules: list[str] | str | None = Field(default=None, description="Layers to leave out, as PEFT's.")
    layers_to_transform: list[int] | int | None = Field(default=None, description="Numbers of layers, as PEFT's.")
    modules_to_save: list[str] | None = Field(default=None, description="Modules that train whole besides, as PEFT's.")
    seed: int = Field(default=0, description="Seed of the first factor, of the dealing and of the draws.")


@register("mosa")
class MoSA(PeftTuner):
    """Mixture of Sparse Adapters: the entries of a LoRA's factors are dealt to experts, which train by turns.

    Each expert is the initial factor but for the entries that it owns. A training pass draws one expert per factor and
    layer; inference uses their mean, one plain LoRA, to which it exports exactly. Trains as many numbers as that LoRA,
    each in one of ``n_experts`` passes. Two passes per step, whose divergence is a part of the loss, take twice LoRA's
    time; ``gamma: 0`` leaves one.

    Differences from the authors' code: an expert holds its own entries only, where theirs holds a copy of the matrix;
    the draws are a function of the seed and the step, the same in every process, after a resume and when activations
    are computed again; sets of equal size come from ranks, not from thresholds.

    References:
        Zhang et al., "Split & Merge: Unlocking the Potential of Visual Adapters via Sparse Training", arXiv 2312.02923.
    """

    paper: ClassVar[str] = "arXiv 2312.02923"
    Config: ClassVar[type[MethodConfig]] = MoSAConfig
    config: MoSAConfig
    # The tuner is ours and says itself what is wrong; only what PEFT says of targets comes as a ValueError.
    refuses_by: ClassVar[tuple[type[Exception], ...]] = (ValueError,)
    stock: ClassVar[bool] = False
    takes_turns: ClassVar[bool] = True

    def _peft_type(self) -> Any:
        from finetune.methods.primitives.mosa_tuner import MOSA

        return MOSA

    def _peft_config(self, found: Mapping[str, Any]) -> Any:
        from finetune.methods.primitives.mosa_tuner import MosaConfig

        return MosaConfig(task_type="CAUSAL_LM", **{**dict(self.config), **found})

    def _layers(self) -> dict[str, MosaLinear]:
        from finetune.methods.primitives.mosa_layer import MosaLinear

        model = cast(Any, self.model).base_model.model
        return {name: layer for name, layer in model.named_modules() if isinstance(layer, MosaLinear)}

    def at_rest(self) -> frozenset[str]:
        """Returns the experts that no pass of this step drew."""
        from finetune.methods.primitives.sparse_experts import SparseExperts

        matrices = ((name, m) for name, m in self.model.named_modules() if isinstance(m, SparseExperts))
        return frozenset(f"{name}.{own}" for name, matrix in matrices for own in matrix.resting())

    def export_adapter(self, folder: str | Path) -> None:
        """Writes the mean over the experts as a stock LoRA adapter; the update is the same, bit for bit."""
        from finetune.methods.primitives.lora_export import write_lora

        write_lora(Path(folder), self._layers(), self.config.alpha, base_model=str(self.metadata()["base_model"]))
