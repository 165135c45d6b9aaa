"""MeZO: stochastic gradient descent along random directions of all weights, by two forward passes per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from finetune.core.errors import CapabilityError
from finetune.core.learned_state import VALUE, require_same_shapes
from finetune.methods.base import Kind, MethodConfig, MethodSummary
from finetune.methods.estimator import Estimator, EstimatorConfig
from finetune.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor, nn

    from finetune.methods.primitives.dense_directions import DenseDirections

__all__ = ["Mezo", "MezoConfig"]


class MezoConfig(EstimatorConfig):
    """How dense directions are made and applied."""

    noise: Literal["rademacher", "binomial", "gaussian"] = Field(
        default="rademacher",
        description="Distribution of a direction's entries. Signs have the least variance, cost least, and are the "
        "same bits on every device; gaussian is the paper's.",
    )
    engine: Literal["copy", "onthefly", "inplace"] = Field(
        default="onthefly",
        description="Where weights are perturbed: in a copy of all that trains, in a buffer of one transformer block "
        "at a time, or in place as the paper does, which leaves rounding in the weights.",
    )
    trainable_dtype: Literal["float32", "base"] = Field(
        default="float32",
        description="Dtype of the weights that train. float32 keeps every step, and the forward runs under autocast; "
        "base keeps 16-bit weights and rounds each update up or down by chance.",
    )
    allow_drift: bool = Field(
        default=False, description="Lets engine inplace perturb 16-bit weights, which turns them into a random walk."
    )

    @model_validator(mode="after")
    def _inplace_is_exact_in_float32_only(self) -> MezoConfig:
        if self.engine == "inplace" and self.trainable_dtype == "base" and not self.allow_drift:
            raise ValueError(
                "in place, 16-bit weights do not come back from a perturbation: 100 steps move them by 4 %. "
                "Take engine: onthefly, trainable_dtype: float32, or allow_drift: true"
            )
        return self


@register("mezo")
class Mezo(Estimator):
    """Trains whole tensors, or what an earlier method added or chose, by the slope along a direction of all entries.

    ``g = (L(W + eps z) - L(W - eps z)) / 2 eps;  W <- W - lr g z`` (MeZO, algorithm 1), with the optimizer's rule in
    place of ``lr g``. Memory: float32 weights, a buffer of the largest transformer block and of what lies outside the
    blocks (``engine: onthefly``), the activations of a forward pass. Saved: the trained tensors, and the log.

    References:
        Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", arXiv 2305.17333.
    """

    paper: ClassVar[str] = "arXiv 2305.17333"
    kind: ClassVar[Kind] = "subset"
    narrows_added: ClassVar[bool] = True
    narrows_entries: ClassVar[bool] = True
    whole_earlier: ClassVar[str] = "it moves what an earlier method added or chose, and no process would have it whole"
    Config: ClassVar[type[MethodConfig]] = MezoConfig
    config: MezoConfig

    def _directions_over(self, model: Any, candidates: frozenset[str]) -> DenseDirections:
        from finetune.methods.primitives.dense_directions import DenseDirections
        from finetune.methods.primitives.master_weights import AutocastForward, widen

        self._owner = model
        self._names = tuple(name for name, _ in model.named_parameters() if name in candidates)
        self._base_dtypes = {name: parameter.dtype for name, parameter in self._tensors.items()}
        self._check(self._tensors)
        self._autocast = None
        if self.config.trainable_dtype == "float32" and (narrow := widen(self._tensors.values())) is not None:
            self._autocast = AutocastForward([model], narrow)
        return DenseDirections(
            model,
            self._names,
            seed=self.config.seed,
            noise=self.config.noise,
            engine="copy" if self.earlier and self.config.engine == "onthefly" else self.config.engine,
            limits=self._limits(),
            stochastic=True,
            decays=self.earlier is None,
            changed=self.earlier.write_values if self.earlier else None,
            alike=self.config.directions == "shared" and self.config.perturbation_parallel == 1,
        )

    @property
    def _tensors(self) -> dict[str, nn.Parameter]:
        """What moves, as the modules hold it now: FSDP2 puts shards in its place."""
        return {name: self._owner.get_parameter(name) for name in self._names}

    def _limits(self) -> dict[str, float]:
        """Returns the largest magnitude of an entry that trains, for the tensors that have one."""
        return {}

    def _check(self, tensors: dict[str, nn.Parameter]) -> None:
        import torch

        for name, parameter in tensors.items():
            if not parameter.is_floating_point():
                raise CapabilityError(
                    f"{self.name} moves weights, and these are quantised",
                    where=name,
                    got=str(parameter.dtype),
                    fix="method: [{name: lora}, {name: mezo}], or method.name: lozo",
                )
            if parameter.dtype == torch.float16 and self.config.trainable_dtype == "base":
                raise CapabilityError(
                    "float16 weights lose the updates of a zeroth-order method",
                    where="method.trainable_dtype",
                    got="base, with float16 weights",
                    fix="method.trainable_dtype: float32, or model.dtype: bfloat16",
                )

    def learned_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that train, in the dtype that trains; a sharded one in one piece."""
        from finetune.methods.primitives.sharding import whole

        return {name: whole(parameter) for name, parameter in self._tensors.items()}

    def touched(self) -> frozenset[str]:
        """Returns their names."""
        return frozenset(self._names)

    def saved_scalars(self) -> int:
        """Returns the number of their entries."""
        return self.summary().trained

    def summary(self) -> MethodSummary:
        """Returns what moves: the optimizer holds one number per direction instead."""
        tensors = self._tensors.values()
        return MethodSummary(
            name=self.name,
            trained=sum(p.numel() for p in tensors),
            total=self._total,
            trained_bytes=sum(p.numel() * p.element_size() for p in tensors),
            chosen=(
                f"{len(tensors)} tensors move along {self._per_step} {self.config.noise} direction(s) per step",
                f"the optimizer holds {self._distance.numel()} number(s), the projected gradient",
            ),
        )

    def metadata(self) -> dict[str, Any]:
        """Returns the metadata with the names of what trains, which say the number of each tensor in the noise."""
        return {
            **super().metadata(),
            "scope": sorted(self._names),
            "over": self.earlier.name if self.earlier else None,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Returns ``NAME.value`` per trained tensor, unless an earlier method saves them, and the log."""
        own = {} if self.earlier else {f"{name}{VALUE}": t for name, t in self.learned_tensors().items()}
        return {**own, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copies the values into the trained tensors, and restores the log; strict."""
        from finetune.methods.primitives.sharding import put_whole

        super().load_state_dict(state)
        if self.earlier:
            return
        own: dict[str, Tensor] = {f"{name}{VALUE}": parameter for name, parameter in self._tensors.items()}
        require_same_shapes(own, {key: tensor for key, tensor in state.items() if key.endswith(VALUE)})
        for name, parameter in self._tensors.items():
            put_whole(parameter, state[f"{name}{VALUE}"])

    def merge(self) -> nn.Module:
        """Rounds the trained tensors to the base's dtype and returns the model."""
        from finetune.methods.primitives.master_weights import cast_in_place

        if self._autocast is not None:
            self._autocast.remove()
        for name, parameter in self._tensors.items():
            cast_in_place(parameter, self._base_dtypes[name])
        self._names = ()
        return self._detach()
