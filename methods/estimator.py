"""Base of the zeroth-order methods: what the optimizer holds is one number per direction, found by forward passes.

The model gets a parameter with one element per direction, zero before every step: how far to go along it. The model's
forward measures the slopes of the loss, ``loss.backward()`` delivers them as that parameter's gradient, and any
optimizer turns them into distances. After its step the weights are moved, the parameter is zero again, and the next
step has new directions. So the optimizer is the update rule: SGD is MeZO's, and Adam without momentum divides by the
root mean square of the slopes.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from finetune.core.errors import CapabilityError, CheckpointError, FinetuneWarning, TrainingError
from finetune.core.learned_state import TRAINING
from finetune.methods.base import MethodConfig
from finetune.methods.in_place import InPlace
from finetune.methods.objective import NEEDS_OPTIONS, SMOOTH, Objective, load_objective

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from transformers import TrainingArguments

    from finetune.methods.primitives.projected_gradient import Directions
    from finetune.methods.primitives.slope_rules import SlopeRule

__all__ = ["DECAYS", "DISTANCES", "Eps", "Estimator", "EstimatorConfig"]

DISTANCES, DECAYS = f"{TRAINING}distances", f"{TRAINING}decays"
"""Keys of the log in a learned state: how far each step went along each direction, float32 (steps, queries), and what
the weights were multiplied with before, float64 (steps,)."""
EPS = f"{TRAINING}eps"
"""Key of the distance that ``eps: auto`` has come to, float64 ()."""

_WATCHED = 20
"""Steps at which ties are counted."""

Eps = Annotated[float, Field(gt=0)] | Literal["auto"]
"""Distance to the points at which the loss is measured, or to be found out at the first step."""


class EstimatorConfig(MethodConfig):
    """What all zeroth-order methods share."""

    eps: Eps = Field(
        default=1e-3,
        description="Distance to the points at which the loss is measured. 1e-3 suits a float32 forward pass; in "
        "bfloat16 the loss's rounding drowns so small a difference, and 1e-2 suits. auto: the smallest of some that "
        "gives slopes good to 30 %, by 48 forward passes at the first step.",
    )
    objective: Objective = Field(
        default="loss",
        description="What is minimised: loss (the model's own), option_likelihood (to tell the options of a question "
        "apart), minus accuracy (of options), exact_match or f1 (of greedy answers), or module:function, called as "
        "function(model, batch), whose result is any number.",
    )
    queries: int = Field(default=1, ge=1, le=255, description="Directions of one step, whose estimates are averaged.")
    directions: Literal["shared", "independent"] = Field(
        default="shared",
        description="Whether all processes measure along the same directions, each on its rows, or each along its own: "
        "then a step has as many times the directions, whose estimates are averaged, and bears a larger learning rate.",
    )
    perturbation_parallel: int = Field(
        default=1,
        ge=1,
        description="Processes in a row that have the same rows and split the forward passes of a step; it divides "
        "their number, 2 per direction. The other processes are more such groups, each with its rows.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of the directions.")

    @property
    def passes(self) -> int:
        """Forward passes of one step."""
        return 2 * self.queries

    @model_validator(mode="after")
    def _passes_divide(self) -> Self:
        if self.passes % self.perturbation_parallel:
            raise ValueError(
                f"perturbation_parallel: {self.perturbation_parallel} does not divide the {self.passes} forward "
                f"passes of a step of {self.queries} direction(s)"
            )
        return self


class Estimator(InPlace):
    """Moves weights along random directions, by slopes that forward passes measure.

    Memory: the model, the activations of a forward pass, and what the form of the directions needs; no gradient and no
    optimizer state of the size of the weights. A learned state holds the log of the run besides: one number per
    direction and step, from which :meth:`replay` makes the same weights again.
    """

    own_optimizer: ClassVar[str] = "its optimizer holds one number per direction, and there is nothing to spread"
    Config: ClassVar[type[MethodConfig]] = EstimatorConfig
    config: EstimatorConfig
    _directions: Directions

    @property
    def _per_step(self) -> int:
        """Directions of one step over all processes."""
        return self.config.queries * self._shares

    @property
    def needs_options(self) -> bool:
        """Whether the objective compares the options of a question."""
        return self.config.objective in NEEDS_OPTIONS

    @property
    def same_rows(self) -> int:
        """How many processes split the passes of a step."""
        return self.config.perturbation_parallel

    @abstractmethod
    def _directions_over(self, model: nn.Module, candidates: frozenset[str]) -> Directions:
        """Returns the directions over what this method trains of a wholly frozen ``model``."""

    @abstractmethod
    def learned_tensors(self) -> dict[str, Tensor]:
        """Returns what the directions move, by name."""

    def _rule(self) -> SlopeRule:
        """Returns how losses become slopes."""
        from finetune.methods.primitives.slope_rules import TWO_POINT

        return TWO_POINT

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        import torch
        from torch import nn

        from finetune.methods.primitives.hidden_parameter import hide_parameter
        from finetune.methods.primitives.measured_eps import Measurement
        from finetune.methods.primitives.process_group import processes
        from finetune.methods.primitives.projected_gradient import PARAMETER, ProjectedForward
        from finetune.methods.primitives.shared_passes import SharedPasses
        from finetune.methods.primitives.step_sync import after_optimizer_step, before_optimizer_step

        _refuse_offloaded(model)
        objective = None if self.config.objective == "loss" else load_objective(self.config.objective)
        independent = self.config.directions == "independent"
        # What several processes have trained is loaded by one, which is no group of several.
        self._shares = max(1, processes() // self.config.perturbation_parallel) if independent else 1
        self._directions = self._directions_over(model, candidates)
        # Processes have nothing but slopes to say to each other: no weights at the start, no buffers at every pass.
        silent = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        model._ddp_params_and_buffers_to_ignore = silent  # type: ignore[assignment]
        self._distance = nn.Parameter(torch.zeros(self._per_step, device=next(model.parameters()).device))
        model.register_parameter(PARAMETER, self._distance)
        self._hooks = hide_parameter(model, PARAMETER, PARAMETER, _nothing)
        passes = SharedPasses(self._rule(), self.config.queries, self.config.perturbation_parallel, independent)
        self._measurement = Measurement(passes, self._directions, self.config.eps)
        # Shares of a batch are steps, whose noise cannot be told from what they measure.
        self._measurement.settled = self.config.eps != "auto" and self.config.objective not in SMOOTH
        self._forward = ProjectedForward(model, self._directions, self._measurement, objective)
        self._before = before_optimizer_step([self._distance], self._before_step)
        self._after = after_optimizer_step([self._distance], self._after_step)
        self._distances: list[Tensor] = []
        self._decays: list[float] = []
        self._checked = False
        self._watched = self._ties = 0
        return model

    def _detach(self) -> nn.Module:
        """Makes the model plain but for what the directions have moved, and returns it."""
        from finetune.methods.primitives.projected_gradient import PARAMETER

        for handle in (self._before, self._after, *self._hooks):
            handle.remove()
        self._forward.remove()
        self._directions.remove()
        model, self._model = self.model, None
        delattr(model, PARAMETER)
        del model._ddp_params_and_buffers_to_ignore
        return model

    def check_arguments(self, arguments: TrainingArguments) -> None:
        """Refuses what would scale the loss or shard the one parameter."""
        if arguments.fp16:
            raise CapabilityError(
                f"{self.name} measures differences of the loss, which float16 rounds away",
                where="train.fp16",
                got="true",
                want="bfloat16 or float32",
                fix="train.bf16: true, or neither",
            )
        if arguments.deepspeed is not None:
            raise CapabilityError(
                f"{self.name} has no gradients and no optimizer state that DeepSpeed could shard",
                where="train.deepspeed",
                fix="one process, or DistributedDataParallel: only the slopes travel",
            )

    def replay(self, distances: Tensor, decays: Tensor) -> None:
        """Makes the steps of a log again, after those that this method has taken.

        Args:
            distances: Float32 (steps, queries).
            decays: Float64 (steps,).
        """
        for row, decay in zip(distances.to(self._distance.device), decays.tolist(), strict=True):
            self._take(row, decay)

    def _before_step(self, optimizer: Optimizer) -> None:
        import torch

        if self._distances and len(self._distances[-1]) != self._per_step:
            raise TrainingError(
                "the run was made by another number of processes, each with directions of its own",
                where="method.directions",
                got=f"{self._per_step} direction(s) per step",
                want=f"{len(self._distances[-1])}",
                fix="as many processes as before",
            )
        group = self._group(optimizer)
        if group.get("momentum") or group.get("betas", (0.0,))[0]:
            warnings.warn(
                f"the momentum of {type(optimizer).__name__} is switched off: it would carry the slope of one "
                "direction over to the next, which has nothing to do with it",
                FinetuneWarning,
                stacklevel=2,
            )
            group.update({"momentum": 0.0} if "momentum" in group else {"betas": (0.0, *group["betas"][1:])})
        gradient = self._distance.grad
        if gradient is not None:
            self._check_processes(gradient)
            # A loss that is not finite says nothing: the step stays where it is, and the optimizer's state finite.
            gradient.copy_(torch.where(torch.isfinite(gradient).all(), gradient, 0.0))
            self._count_ties(gradient)

    def _count_ties(self, gradient: Tensor) -> None:
        """Says once where most of the first steps moved nothing, as happens with a share of few rows."""
        if self.config.objective in SMOOTH or self._watched == _WATCHED:
            return
        self._watched += 1
        self._ties += not gradient.any()
        if self._watched == _WATCHED and 2 * self._ties > _WATCHED:
            warnings.warn(
                f"at {self._ties} of the first {_WATCHED} steps the objective was the same on both sides, so that "
                "nothing moved: take larger batches, or a larger eps",
                FinetuneWarning,
                stacklevel=2,
            )

    def _after_step(self, optimizer: Optimizer) -> None:
        group = self._group(optimizer)
        distances = self._distance.detach().clone()
        self._distance.detach().zero_()
        self._take(distances, 1.0 - float(group["lr"]) * float(group.get("weight_decay", 0.0)))

    def _take(self, distances: Tensor, decay: float) -> None:
        self._directions.move(distances, decay=decay)
        self._distances.append(distances)
        self._decays.append(decay)

    def _group(self, optimizer: Optimizer) -> dict[str, Any]:
        return next(g for g in optimizer.param_groups if any(p is self._distance for p in g["params"]))

    def _check_processes(self, gradient: Tensor) -> None:
        """Finds out at the first step whether all processes begin with the same weights and got the same slopes."""
        import hashlib

        from torch.distributed.fsdp import FSDPModule

        from finetune.core.fingerprint import base_fingerprint
        from finetune.methods.primitives.process_group import processes, require_same_over_processes

        if self._checked or processes() == 1:
            return
        self._checked = True
        groups = processes() // self.config.perturbation_parallel
        if self.config.directions == "independent" and self._shares != groups:
            raise TrainingError(
                "the method was attached before the processes knew of each other, and all have the same directions",
                where="method.directions",
                got="independent",
                fix="torch.distributed.init_process_group before method.attach, or directions: shared",
            )
        # Shards are not the same everywhere, and are made of one process's weights.
        weights = "" if isinstance(self.model, FSDPModule) else base_fingerprint(self.model)
        digest = hashlib.sha256(weights.encode() + gradient.cpu().numpy().tobytes()).digest()
        require_same_over_processes(digest[:16], "weights and slopes", gradient.device)

    def averages(self) -> frozenset[str]:
        """Returns the name of the slopes, which are those of all processes."""
        from finetune.methods.primitives.projected_gradient import PARAMETER

        return frozenset({PARAMETER})

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the log of the run; a subclass adds what the steps came to."""
        import torch

        distances = torch.stack(self._distances) if self._distances else torch.zeros(0, self._per_step)
        log = {DISTANCES: distances.cpu(), DECAYS: torch.tensor(self._decays, dtype=torch.float64)}
        if self.config.eps == "auto" and self._measurement.settled:
            log[EPS] = torch.tensor(self._measurement.eps, dtype=torch.float64)
        return log

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores the log, and the step whose directions come next; strict."""
        missing = sorted({DISTANCES, DECAYS} - state.keys())
        if missing:
            raise CheckpointError("the learned state has no log of its steps", where=", ".join(missing))
        self._distances = list(state[DISTANCES].to(self._distance.device))
        self._decays = state[DECAYS].tolist()
        self._directions.step = len(self._decays)
        self._measurement.settled |= bool(self._decays)
        if EPS in state:
            self._measurement.eps = float(state[EPS])


def _refuse_offloaded(model: nn.Module) -> None:
    places: Any = getattr(model, "hf_device_map", None) or {}
    elsewhere = {"cpu", "disk"} & {str(place) for place in places.values()} and len(set(places.values())) > 1
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    if elsewhere or (hooked and any(parameter.is_meta for parameter in model.parameters())):
        devices = {str(parameter.device) for parameter in model.parameters()}
        raise CapabilityError(
            "accelerate keeps parts of the model elsewhere and brings copies of them, so that what is written into "
            "them is lost",
            where="model",
            got=f"weights on {', '.join(sorted(devices | set(map(str, places.values()))))}",
            want="a model that lies on one device",
        )


def _nothing() -> None:
    """The weights are not what the hidden parameter says: nothing follows from loading them."""
