"""LOZO: zeroth-order descent along low-rank directions, beside weights that are only read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from finetune.core.errors import CapabilityError, TargetError
from finetune.core.learned_state import LEFT, TRAINING, require_same_shapes
from finetune.methods.base import Kind, MethodConfig, MethodSummary
from finetune.methods.estimator import DECAYS, DISTANCES, Eps, Estimator, EstimatorConfig
from finetune.methods.registry import register
from finetune.methods.selected_entries import Scope

if TYPE_CHECKING:
    from torch import Tensor, nn

    from finetune.methods.primitives.low_rank_directions import LowRankDirections

__all__ = ["Lozo", "LozoConfig"]

_MOMENTUM = f"{TRAINING}momentum/"


class LozoConfig(EstimatorConfig):
    """How low-rank directions are made, and of which layers."""

    eps: Eps = Field(
        default=1e-2,
        description="Distance to the points at which the loss is measured. Directions of low rank bear 1e-2, which a "
        "bfloat16 forward pass needs. auto: found out at the first step.",
    )
    directions: Literal["shared", "independent"] = Field(
        default="independent",
        description="Whether all processes measure along the same directions, each on its rows, or each along its own: "
        "then a step has as many times the directions, and bears a larger learning rate.",
    )
    rank: int = Field(default=1, ge=1, description="Rank of one direction.")
    lazy_interval: int = Field(
        default=50,
        ge=1,
        description="Steps that share the right factors of their directions. What is learned gets this much of rank "
        "per interval: 20,000 steps of 50 make a rank of 400, so a long run takes a longer interval.",
    )
    momentum: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the last step that the next one keeps (LOZO-M): smoothed left factors, float32, one more "
        "per layer. The optimizer's own momentum would mix up directions, and is switched off.",
    )
    scope: Scope = Field(default=Scope(), description="Weights of linear layers that move.")


@register("lozo")
class Lozo(Estimator):
    """Moves the linear layers of the blocks along ``Z = U V^T / sqrt(r)``, U new at every step, V for an interval.

    ``g = (L(W + eps Z) - L(W - eps Z)) / 2 eps;  W <- W - lr g Z`` (LOZO, algorithm 1), with the optimizer's rule
    in place of ``lr g``; U and V are random signs. The forward adds ``(x V) U^T`` beside each layer: weights are
    only read, in 16 bit or quantised too, and what was learned is exact in float32. Memory besides the model:
    out_features numbers per layer, rank and interval. Saved: these. Exports exactly to LoRA.

    References:
        Chen et al., "Enhancing Zeroth-order Fine-tuning for Language Models with Low-rank Structures",
        arXiv 2410.07698.
    """

    paper: ClassVar[str] = "arXiv 2410.07698"
    kind: ClassVar[Kind] = "delta"
    Config: ClassVar[type[MethodConfig]] = LozoConfig
    config: LozoConfig
    _directions: LowRankDirections

    @property
    def writes_base(self) -> bool:
        """False: the weights are only read."""
        return False

    def _directions_over(self, model: nn.Module, candidates: frozenset[str]) -> LowRankDirections:
        from finetune.methods.primitives.low_rank_directions import LowRankDirections

        return LowRankDirections(
            self._layers(model, candidates),
            seed=self.config.seed,
            queries=self._per_step,
            rank=self.config.rank,
            interval=self.config.lazy_interval,
            momentum=self.config.momentum,
        )

    def _layers(self, model: Any, candidates: frozenset[str]) -> dict[str, nn.Module]:
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        from finetune.methods.primitives.entry_scope import choose_scope

        head = model.get_output_embeddings()
        linear = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and module is not head
        }
        given = {name: p for name, p in model.named_parameters() if name in candidates}
        # Where patterns name them, other weights are in the scope, to be refused by name.
        allowed = given if self.config.scope.include else {name: p for name, p in given.items() if name in linear}
        scope = choose_scope(model, allowed, include=self.config.scope.include, exclude=self.config.scope.exclude)
        strangers = [name for name in scope if name not in linear]
        if strangers:
            raise TargetError(
                "lozo moves linear layers between embedding and output head only",
                where="method.scope.include",
                got=", ".join(strangers[:4]),
                fix="patterns of linear layers, or method.name: mezo, which moves any tensor",
            )
        return {name: linear[name] for name in scope}

    def learned_tensors(self) -> dict[str, Tensor]:
        """Returns ``NAME.left`` for the weight of each layer."""
        return {f"{name}{LEFT}": branch.left for name, branch in self._directions.branches.items()}

    def touched(self) -> frozenset[str]:
        """Returns none."""
        return frozenset()

    def saved_scalars(self) -> int:
        """Returns the size of the left factors of all intervals so far."""
        return sum(tensor.numel() for tensor in self.learned_tensors().values())

    def summary(self) -> MethodSummary:
        """Returns what a step moves: the left factors of one interval."""
        branches = self._directions.branches.values()
        trained = sum(branch.widths[1] for branch in branches) * self._directions.columns
        moved = sum(branch.widths[0] * branch.widths[1] for branch in branches)
        return MethodSummary(
            name=self.name,
            trained=trained,
            total=self._total,
            trained_bytes=4 * trained,
            chosen=(
                f"{moved:,} entries of {len(branches)} linear layers move along {self._per_step} direction(s) of "
                f"rank {self.config.rank}",
                f"the optimizer holds {self._distance.numel()} number(s), the projected gradient",
            ),
        )

    def metadata(self) -> dict[str, Any]:
        """Returns the metadata with the names of the weights, which say the number of each in the noise."""
        return {**super().metadata(), "scope": sorted(self._directions.branches)}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns ``NAME.left``, float32 (out_features, rank so far), per layer, the log, and momenta."""
        momenta = {f"{_MOMENTUM}{name}": tensor for name, tensor in self._directions.momenta.items()}
        return {**self.learned_tensors(), **super().state_dict(), **momenta}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores the left factors, the log and momenta, and makes the right factors; strict."""
        import torch

        super().load_state_dict(state)
        steps, self._directions.queries = len(state[DECAYS]), state[DISTANCES].shape[1]
        shapes = self._directions.shapes(steps)
        own = {f"{name}{LEFT}": torch.empty(shape, device="meta") for name, shape in shapes.items()}
        own |= {f"{_MOMENTUM}{name}": tensor for name, tensor in self._directions.momenta.items()}
        found = {key: tensor for key, tensor in state.items() if key.endswith(LEFT) or key.startswith(_MOMENTUM)}
        require_same_shapes(own, found)
        momenta = {name: state[f"{_MOMENTUM}{name}"] for name in self._directions.momenta}
        self._directions.restore({name: state[f"{name}{LEFT}"] for name in shapes}, momenta, steps)

    def export_adapter(self, folder: str | Path) -> None:
        """Writes what was learned as a stock LoRA adapter of the rank that all intervals add up to."""
        from finetune.methods.primitives.lora_export import write_lora

        layers = {name.removesuffix(".weight"): branch for name, branch in self._directions.branches.items()}
        rank = next(iter(layers.values())).left.shape[1]
        write_lora(Path(folder), layers, rank, base_model=str(self.metadata()["base_model"]))

    def merge(self) -> nn.Module:
        """Adds what was learned to the weights, in float32, rounded once, and returns the model.

        Raises:
            CapabilityError: The weights are quantised.
        """
        import torch
        from transformers.pytorch_utils import Conv1D

        with torch.no_grad():
            for name, branch in self._directions.branches.items():
                layer: Any = self.model.get_submodule(name.removesuffix(".weight"))
                if not layer.weight.is_floating_point():
                    raise CapabilityError(
                        "a quantised weight cannot take the change up",
                        where=name,
                        got=str(layer.weight.dtype),
                        fix="finetune export --to peft, or load the base unquantised",
                    )
                change = branch.left @ branch.right.t()
                layer.weight.copy_(layer.weight.float() + (change.t() if isinstance(layer, Conv1D) else change))
        return self._detach()
