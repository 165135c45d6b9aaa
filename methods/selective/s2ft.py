"""S2FT: trains whole attention heads and feed-forward channels of a model's own weights, in place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from finetune.core.errors import CapabilityError, CheckpointError, FinetuneWarning, TargetError
from finetune.core.learned_state import (
    BASE,
    DELTA,
    INDEX,
    TRAINING,
    VALUE,
    narrowest_exact,
    require_same_shapes,
)
from finetune.methods.amounts import Amount, count_of
from finetune.methods.base import Kind, MethodConfig
from finetune.methods.in_place import InPlace
from finetune.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from finetune.methods.primitives.slice_delta import SliceDelta
    from finetune.methods.primitives.unit_plan import LayerPlan
    from finetune.methods.primitives.weight_slice import WeightSlice

__all__ = ["S2FT", "S2FTConfig"]


class S2FTConfig(MethodConfig):
    """What S2FT trains. A ratio is a share in [0, 1]."""

    ratio: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="Share of the block linears' weights that trains, half of it heads and half of it channels.",
    )
    o_ratio: float | None = Field(
        default=None, ge=0, le=1, description="Share of all attention heads whose o_proj columns train; null: by ratio."
    )
    down_ratio: float | None = Field(
        default=None, ge=0, le=1, description="Share of all channels whose down_proj columns train; null: by ratio."
    )
    v_ratio: float = Field(
        default=0, ge=0, le=1, description="Share of all key-value heads whose v_proj rows train besides."
    )
    up_ratio: float = Field(
        default=0, ge=0, le=1, description="Share of all channels whose up_proj rows train besides."
    )
    gate_ratio: float = Field(
        default=0, ge=0, le=1, description="Share of all channels whose gate_proj rows train besides."
    )
    select: Literal["random", "weight", "activation", "product", "gradient"] = Field(
        default="random",
        description="Score of a head or channel: random, the norm of its columns of o_proj or down_proj, of its "
        "activations, both multiplied, or the norm of the gradient of its columns.",
    )
    pick: Literal["largest", "smallest"] = Field(
        default="smallest", description="Which end of the scores to take; without effect for random."
    )
    calibration: Amount = Field(
        default=0.01,
        description="Training examples that activation, product and gradient look at: a share (0.01) or their number.",
    )
    form: Literal["inplace", "delta"] = Field(
        default="inplace",
        description="inplace trains the weights; delta adds a trained change in the forward pass, for quantised bases.",
    )
    fused_mlp: bool = Field(
        default=False,
        description="Runs the second half of gated feed-forward blocks as one function that keeps less for the "
        "backward pass.",
    )
    exclude_adapters: list[str] = Field(
        default=[], description="Folders of learned states whose heads and channels are not chosen again."
    )
    weight_decay_target: Literal["zero", "base"] = Field(
        default="zero", description="What weight decay pulls the trained slices towards: zero, or their base values."
    )
    seed: int = Field(default=0, description="Seed of the random selection and of the rounding over layers.")


@register("s2ft")
class S2FT(InPlace):
    """Trains a few attention heads and feed-forward channels in place: structured, and as small as an adapter.

    The columns of ``o_proj`` that belong to chosen query heads and the columns of ``down_proj`` that belong to chosen
    channels train as one dense float32 slice per layer; everything else stays bit-identical. ``W[:, S] <- W[:, S] -
    optimizer(dL/dW[:, S])``, where the backward forms only that slice of the gradient and keeps only that slice of the
    layer's input. On request rows of ``v_proj`` (of key-value heads), ``up_proj`` and ``gate_proj`` train too. Memory
    per trained parameter: 4 bytes value, 4 gradient, 8 Adam, and the base's value. Saved: index, value and base value
    of each slice. The update has the rank of the slice, so it exports exactly as a LoRA adapter.

    Differences from the authors' code: every query head may be chosen under GQA (nothing is permuted), the number of
    trained columns is exact (rounding is spread over layers), slices have a float32 master, any input rank works.

    References:
        Yang et al., "S2FT: Efficient, Scalable and Generalizable LLM Fine-tuning by Structured Sparsity",
        arXiv 2412.06289, sections 3.1-3.3; selection in section 3.2.
    """

    paper: ClassVar[str] = "arXiv 2412.06289"
    kind: ClassVar[Kind] = "delta"
    Config: ClassVar[type[MethodConfig]] = S2FTConfig
    config: S2FTConfig

    @property
    def writes_base(self) -> bool:
        """Whether the form is in place."""
        return self.config.form == "inplace"

    def calibration_examples(self, total: int) -> int:
        """Returns how many examples the scores look at."""
        return 0 if self.config.select in ("random", "weight") else count_of(self.config.calibration, total)

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        from finetune.methods.primitives.step_sync import after_optimizer_step
        from finetune.methods.primitives.unit_plan import plan_units

        plans = plan_units(model, candidates, self.config, self._calibration, chosen_before=self._chosen_before)
        self._warn_if_empty(plans)
        self._slices: dict[str, WeightSlice | SliceDelta] = {}
        for plan in plans:
            if plan.index.numel():
                self._slices[plan.layer] = self._slice(model.get_submodule(plan.layer), plan)
        self._fused = _fuse(model, self._slices) if self.config.fused_mlp else []
        self._sync = after_optimizer_step([layer.trained for layer in self._slices.values()], self._after_step)
        return model

    def _slice(self, layer: nn.Module, plan: LayerPlan) -> WeightSlice | SliceDelta:
        from finetune.methods.primitives.slice_delta import add_slice_delta
        from finetune.methods.primitives.weight_slice import can_slice, slice_weight

        if self.config.form == "delta":
            return add_slice_delta(layer, plan.index, axis=plan.axis)
        if not can_slice(layer):
            raise TargetError(
                f"s2ft cannot train a {type(layer).__name__} in place",
                where=plan.layer,
                want="nn.Linear or Conv1D",
                fix="method.form: delta, or an unquantised base model",
            )
        return slice_weight(layer, plan.index, axis=plan.axis, to_base=self.config.weight_decay_target == "base")

    def _warn_if_empty(self, plans: list[LayerPlan]) -> None:
        import warnings

        for unit in ("attention head", "key-value head", "channel"):
            own = [plan for plan in plans if plan.unit == unit]
            empty = sum(plan.index.numel() == 0 for plan in own)
            if empty:
                warnings.warn(
                    f"s2ft trains no {unit} in {empty} of {len(own)} layers: the ratio is below one {unit} per layer, "
                    "so these layers learn through the others only",
                    FinetuneWarning,
                    stacklevel=2,
                )

    def _after_step(self, optimizer: Optimizer) -> None:
        for layer in self._in_place().values():
            layer.write()

    def _in_place(self) -> dict[str, WeightSlice]:
        return {} if self.config.form == "delta" else self._slices  # type: ignore[return-value]

    def state_dict(self) -> dict[str, Tensor]:
        """Returns per layer ``NAME.weight.{index, value, base}``: int32 (K,), float32 and base dtype (M or N, K).

        A change beside a weight that cannot be read has ``NAME.weight.delta`` for value and base.
        """
        import torch

        state = {}
        for name, layer in self._slices.items():
            state[f"{name}.weight{INDEX}"] = layer.slice_index.to(torch.int32)
            if self.config.form == "delta":
                state[f"{name}.weight{DELTA}"] = layer.trained.detach()
        for name, layer in self._in_place().items():
            state[f"{name}.weight{VALUE}"] = layer.absolute()
            state[f"{name}.weight{BASE}"] = narrowest_exact(layer.slice_base)
            if layer.to_base:
                # The sum with the base is rounded: training goes on from the change itself.
                state[f"{TRAINING}{name}.weight{DELTA}"] = layer.trained.detach()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Trains the slices of ``state`` instead of those chosen at :meth:`attach`; strict."""
        import torch

        require_same_shapes(self.state_dict(), state)
        for name, layer in self._slices.items():
            key, device = f"{name}.weight", layer.slice_index.device
            index = state[f"{key}{INDEX}"].to(device, torch.int64)
            trained = next(
                state[found]
                for found in (f"{TRAINING}{key}{DELTA}", f"{key}{DELTA}", f"{key}{VALUE}")
                if found in state
            )
            layer.select(index, trained.to(device))
        for name, layer in self._in_place().items():
            if not torch.equal(layer.slice_base, state[f"{name}.weight{BASE}"].to(layer.slice_base)):
                raise CheckpointError(
                    "the learned state belongs to another base model", where=name, fix="load the base it was trained on"
                )

    def _axes(self) -> dict[str, int]:
        from finetune.methods.primitives.weight_slice import stored_axis

        return {f"{name}.weight": stored_axis(layer) for name, layer in self._slices.items()}

    def merge(self) -> nn.Module:
        """Makes the layers plain again; in place, their weights hold what was trained already.

        Raises:
            CapabilityError: The change lies beside a quantised weight, which cannot take it up.
        """
        from finetune.methods.primitives.gated_mlp import unfuse_gated_mlp
        from finetune.methods.primitives.slice_delta import merge_slice_delta
        from finetune.methods.primitives.weight_slice import can_slice, unslice_weight

        for name, layer in self._slices.items():
            if self.config.form == "delta" and not can_slice(layer.plain):
                raise CapabilityError(
                    f"a {layer.plain.__name__} cannot take up the change",
                    where=name,
                    fix="finetune export RUN OUT --to peft, or merge into the unquantised base",
                )
        self._sync.remove()
        for block in self._fused:
            unfuse_gated_mlp(block)
        for layer in self._slices.values():
            if self.config.form == "delta":
                merge_slice_delta(layer)  # type: ignore[arg-type]
            else:
                unslice_weight(layer)  # type: ignore[arg-type]
        model, self._model, self._slices = self.model, None, {}
        return model

    def export_adapter(self, folder: str | Path) -> None:
        """Writes the update as a stock PEFT LoRA adapter: one factor selects the slice, the other holds its change.

        Exact: ``W + B A`` equals the tuned weight, since the update is zero outside the slice.
        """
        from finetune.methods.primitives.stock_adapter import WeightChange, write_stock_adapter
        from finetune.methods.primitives.weight_slice import stored_axis

        in_place, changes = self._in_place(), {}
        for name, layer in self._slices.items():
            change = layer.trained.detach()
            if name in in_place:
                base = in_place[name].slice_base
                change = in_place[name].absolute().to(base.dtype).float() - base.float()
            changes[f"{name}.weight"] = WeightChange(stored_axis(layer), layer.slice_index, change)
        write_stock_adapter(Path(folder), changes, self.model, base_model=str(self.metadata()["base_model"]))

    def _chosen(self) -> tuple[str, ...]:
        from finetune.methods.primitives.weight_slice import COLUMNS

        counts: dict[str, list[int]] = {}
        for name, layer in self._slices.items():
            what = f"{'columns' if layer.slice_axis == COLUMNS else 'rows'} of {{}} {name.rpartition('.')[2]} layers"
            counts.setdefault(what, []).append(layer.slice_index.numel())
        return tuple(
            f"{sum(own)} {what.format(len(own))} ({min(own)} to {max(own)} each, {self.config.select})"
            for what, own in counts.items()
        )


def _fuse(model: nn.Module, slices: dict[str, Any]) -> list[nn.Module]:
    """Fuses the gated blocks around the sliced down projections and returns them."""
    from finetune.methods.primitives.gated_mlp import can_fuse, fuse_gated_mlp

    fused = []
    for name in slices:
        parent, _, leaf = name.rpartition(".")
        block = model.get_submodule(parent)
        if leaf == "down_proj" and can_fuse(block):
            fuse_gated_mlp(block)
            fused.append(block)
    if not fused:
        raise TargetError(
            f"{type(model).__name__} has no feed-forward block that can be fused with its trained down projection",
            where="method.fused_mlp",
            want="gate_proj, up_proj and down_proj with the SiLU activation, trained in place",
            fix="method.fused_mlp: false",
        )
    return fused
