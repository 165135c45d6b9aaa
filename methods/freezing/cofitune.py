"""CoFiTune: trains a few modules in the middle of the model, and those of their rows less that matter in general."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from finetune.core.errors import ConfigError
from finetune.methods.amounts import Amount, count_of
from finetune.methods.base import FILE, Kind, MethodConfig
from finetune.methods.in_place import InPlace
from finetune.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from finetune.methods.primitives.trained_rows import TrainedRows

__all__ = ["CoFiTune", "CoFiTuneConfig"]


class CoFiTuneConfig(MethodConfig):
    """Which modules train, and how much each of their rows may move."""

    layers: str = Field(default="25%-50%", description="Transformer layers: 8-15, 25%-50%, first 4, last 4.")
    modules: list[Literal["q", "k", "v", "up", "down", "gate"]] = Field(
        default=["up", "down"], min_length=1, description="Projections of these layers that train."
    )
    soft_mask: bool = Field(
        default=True, description="Whether rows that matter for general ability move less; false: all move alike."
    )
    importance: list[str] = Field(
        default=[],
        description="Files of importances (safetensors: layer -> one number per unit), combined by their maximum; "
        "empty: computed on the calibration examples.",
        json_schema_extra=FILE,
    )
    calibration: Amount = Field(
        default=64,
        description="Examples to compute importances on: their number (64) or a share of them (0.01); general text "
        "(data.calibration) rather than the task's own.",
    )
    estimator: Literal["loss_grad", "kl_dropout"] = Field(
        default="loss_grad",
        description="Importance: gradients of the language-model loss, or, as published, of the divergence between two "
        "passes with dropout.",
    )
    normalize: Literal["tanh_relu", "tanh_abs"] = Field(
        default="tanh_relu",
        description="tanh_relu protects important units; tanh_abs, as published, the least important ones too.",
    )
    apply_to: list[Literal["up", "down", "heads"]] = Field(
        default=["up", "down", "heads"],
        description="Units whose rows are masked: channels (up and gate), outputs of down, attention heads (q, k, v).",
    )
    scale: Literal["update", "gradient"] = Field(
        default="update",
        description="What 1 - importance multiplies: the update, or, as published, the gradient, which Adam undoes.",
    )
    seed: int = Field(default=0, description="Seed of the dropout of kl_dropout.")

    @field_validator("modules", "apply_to")
    @classmethod
    def _each_once(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError("each may be named once")
        return value


@register("cofitune")
class CoFiTune(InPlace):
    """Trains some projections of some layers, each row's update scaled by one minus its unit's importance.

    ``W = W0 + diag(1 - I) V``: V is trained as a float32 parameter, zero at first, by the gradient of W, so that the
    update of any optimizer is scaled, and weight decay pulls to the base. Memory per trained parameter besides the
    weight: 4 bytes V, 4 gradient, 8 Adam, and the base's value.

    Differences from the authors' code: importances are means of absolute gradients, cleared after each example, and
    matched to rows; dropout is put on the attention's output, not on its probabilities; ``scale: update``, since
    gradients that are scaled by constants leave Adam's steps as they are.

    References:
        Zhang et al., "Balancing Speciality and Versatility: A Coarse to Fine Framework for Supervised Fine-tuning Large
        Language Models", arXiv 2404.10306, section 3.
    """

    paper: ClassVar[str] = "arXiv 2404.10306"
    kind: ClassVar[Kind] = "delta"
    shards: ClassVar[bool] = True
    Config: ClassVar[type[MethodConfig]] = CoFiTuneConfig
    config: CoFiTuneConfig

    def calibration_examples(self, total: int) -> int:
        """Returns how many examples to look at; none with files of importances or without the mask."""
        wanted = self.config.soft_mask and not self.config.importance
        return count_of(self.config.calibration, total) if wanted else 0

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        import torch
        from transformers.pytorch_utils import Conv1D

        from finetune.methods.primitives.projections import out_features
        from finetune.methods.primitives.routed_parameter import holders_of
        from finetune.methods.primitives.row_mask import find_rows, row_importance
        from finetune.methods.primitives.step_sync import after_optimizer_step
        from finetune.methods.primitives.trained_rows import TrainedRows

        self._projections = find_rows(model, self.config.layers, self.config.modules, candidates)
        importance, holders = self._importance(model), holders_of(model)
        self._rows: dict[str, TrainedRows] = {}
        for layer in dict.fromkeys(own.layer for own in self._projections):
            parts = sorted((own for own in self._projections if own.layer == layer), key=lambda own: own.first)
            index = torch.cat([torch.arange(own.first, own.first + own.size) for own in parts])
            scale = 1 - torch.cat([row_importance(model, own, importance) for own in parts])
            module = model.get_submodule(layer)
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                name = f"{layer}.{leaf}"
                if name not in candidates:
                    continue
                self._rows[name] = TrainedRows(
                    name,
                    holders[id(parameter)],
                    axis=1 if isinstance(module, Conv1D) and parameter.ndim == 2 else 0,
                    index=None if len(index) == out_features(module) else index,
                    to_base=True,
                    scale=scale if self.config.soft_mask else None,
                    scales_gradient=self.config.soft_mask and self.config.scale == "gradient",
                )
        self._sync = after_optimizer_step(self._trained, self._write)
        return model

    def _importance(self, model: nn.Module) -> dict[tuple[int, str], Tensor]:
        """Returns the importance of each unit, in [0, 1), by transformer layer and kind of unit."""
        import torch

        from finetune.methods.primitives.row_mask import gates_of
        from finetune.methods.primitives.unit_importance import normalized, read_importance, unit_importance

        config = self.config
        if not config.soft_mask:
            return {}
        gates = gates_of(model, self._projections, config.apply_to)
        asked = {rows.units for rows in self._projections} & set(config.apply_to)
        if not asked or asked - {unit for _, unit in gates}:
            raise ConfigError(
                "the mask finds no units to which rows of these modules belong",
                where="method.apply_to",
                got=f"apply_to {config.apply_to} and modules {config.modules}",
                want="up for up and gate, down for down, heads for q, k and v",
                fix="method.soft_mask: false, or other units",
            )
        if self._chosen_before or not (config.importance or self._calibration):
            return {}  # a learned state will say, or there are no weights
        named = {gate.layer: gate for gate in gates.values()}
        if config.importance:
            found = read_importance(config.importance, named)
        else:
            assert self._calibration is not None
            found = [unit_importance(model, named, self._calibration, estimator=config.estimator, seed=config.seed)]
        scores = {
            name: torch.stack([normalized(one[name], config.normalize) for one in found]).amax(0) for name in named
        }
        return {key: scores[gate.layer] for key, gate in gates.items()}

    def _trained(self) -> list[nn.Parameter]:
        return [rows.values for rows in self._rows.values()]

    def _write(self, optimizer: Optimizer) -> None:
        for rows in self._rows.values():
            rows.write()

    def touched(self) -> frozenset[str]:
        """Returns the names of the weights and biases over which rows are laid."""
        return frozenset(self._rows)

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns name and shape of these weights: their layers keep their input for the backward pass."""
        return {name: tuple(rows.weight.shape) for name, rows in self._rows.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns ``NAME.value`` per weight, of fused ones ``index`` and ``base`` too, and what resuming needs."""
        from finetune.methods.primitives.trained_rows import rows_state

        return rows_state(self._rows)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores the rows and their mask; strict."""
        from finetune.methods.primitives.trained_rows import load_rows

        load_rows(self._rows, state)

    def _axes(self) -> dict[str, int]:
        return {name: rows.axis for name, rows in self._rows.items() if rows.index is not None}

    def merge(self) -> nn.Module:
        """Makes the layers plain again; their weights hold what was trained already."""
        self._sync.remove()
        for rows in self._rows.values():
            rows.remove()
        model, self._model, self._rows = self.model, None, {}
        return model

    def _chosen(self) -> tuple[str, ...]:
        blocks = sorted({rows.block for rows in self._projections})
        what = f"{', '.join(self.config.modules)} of layers {blocks[0]} to {blocks[-1]}"
        weights = (rows for name, rows in self._rows.items() if name.endswith("weight"))
        factors = [rows.scale for rows in weights if rows.scale is not None and not rows.scale.is_meta]
        if not factors:
            return (what,)
        import torch

        every = torch.cat(factors)
        low = float((every < 0.5).float().mean())
        return (
            what,
            f"{self.config.scale} of rows multiplied by {float(every.mean()):.2f} on average, "
            f"below 0.5 for {low:.0%} of {every.numel():,} rows",
        )
