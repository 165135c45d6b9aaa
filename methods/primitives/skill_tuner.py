"""The PEFT tuner of low-rank updates that are mixed from skills, with a router that knows each row's task."""

# Legend: U different tasks of a batch, R routers, S splits, K skills

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from peft import PeftConfig
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import Tensor, nn

from finetune.core.errors import CapabilityError, ConfigError, DataError, TargetError, TrainingError, list_choices
from finetune.methods.primitives.peft_registration import register_tuner
from finetune.methods.primitives.skill_layer import LinearSkills
from finetune.methods.primitives.task_routing import ROUTING, Batch, Routing, gates, mixing_weights, place_tasks
from finetune.methods.primitives.tuner_targets import targeted_layers

__all__ = ["SkillsConfig", "SkillsTuner"]

_NEAR_ZERO = 1e-3


@dataclass
class SkillsConfig(PeftConfig):
    """Settings of a tuner whose factors are mixed from skills.

    Attributes:
        tasks: Names of the tasks; a row's is given as ``model(..., tasks=[...])``, one name per row.
        r: Rank of each layer's update.
        n_skills: Skills of each layer.
        n_splits: Parts of each factor that are mixed apart; divides both widths of each layer.
        granularity: ``linear``, ``sublayer``, ``block`` or ``model``: what has a router of its own.
        routing: ``sigmoid``, ``relaxed_bernoulli``, ``straight_through`` or ``uniform``.
        router_speed: The router's logits are so many times its parameters.
        unknown_task: ``error`` or ``uniform``: what happens to rows whose task has not been trained.
        frozen_tasks: How many of the tasks, from the first, train no more.
        train_skills: Whether the skills train, or the router alone.
        alpha: The update is multiplied by ``alpha / r``.
        dropout: Of the adapter's input.
        seed: Of the skills and of the router.
        target_modules: As PEFT's.
        exclude_modules: As PEFT's.
        modules_to_save: As PEFT's.
        layers_to_transform: As PEFT's.
        layers_pattern: As PEFT's.
    """

    tasks: list[str] = field(default_factory=list)
    r: int = 4
    n_skills: int = 8
    n_splits: int = 4
    granularity: str = "linear"
    routing: str = "sigmoid"
    router_speed: float = 100.0
    unknown_task: str = "error"
    frozen_tasks: int = 0
    train_skills: bool = True
    alpha: float = 16
    dropout: float = 0.0
    seed: int = 0
    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type = SKILLS
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, set(getattr(self, name)))

    @property
    def has_router(self) -> bool:
        """Whether there is anything to choose between, and by."""
        return self.n_skills > 1 and self.routing != "uniform"


class SkillsTuner(BaseTuner):
    """Owns the routers, so that wrappers and state dicts see each once, and knows the tasks of the current batch."""

    prefix: str = "mhr_"
    tuner_layer_cls = LinearSkills
    target_module_mapping: Any = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    uses_shared_state = True

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, Tensor] | None = None,
    ) -> None:
        """Makes the routers, then lets PEFT replace the layers."""
        if adapter_name in self.prefix:
            raise ValueError(f"{adapter_name!r} is no name for an adapter: it is a part of {self.prefix!r}")
        if "mhr_router" not in self._modules:
            self.mhr_router, self.mhr_known = nn.ParameterDict({}), BufferDict(persistent=True)
            self.task: str | None = None
            self.seen_outside_backward = False
        config: Any = self._prepare_adapter_config(self.peft_config[adapter_name], self.get_model_config(model))
        self._check(config)
        self._generator = torch.Generator().manual_seed(config.seed)
        self._places = _places(targeted_layers(self, model, config), config)
        self._make_router(adapter_name, config, len(set(self._places.values())), on_meta=low_cpu_mem_usage)
        try:
            super().inject_adapter(
                model,
                adapter_name,
                autocast_adapter_dtype=autocast_adapter_dtype,
                low_cpu_mem_usage=low_cpu_mem_usage,
                state_dict=state_dict,
            )
        except Exception:
            for held in (self.mhr_router, self.mhr_known):
                if adapter_name in held:
                    del held[adapter_name]
            raise
        finally:
            del self._places, self._generator

    def _check(self, config: SkillsConfig) -> None:
        if len(set(config.tasks)) < len(config.tasks):
            raise ConfigError("a task is named twice", where="method.tasks", got=list_choices(config.tasks))
        if config.has_router and len(config.tasks) <= config.frozen_tasks:
            raise ConfigError(
                "there is no task to train for",
                where="method.tasks",
                got=list_choices(config.tasks) or "no task",
                fix="tasks=[...]: the names that model(..., tasks=[...]) gives, one per row",
            )

    def _make_router(self, adapter: str, config: SkillsConfig, routers: int, *, on_meta: bool) -> None:
        if not config.has_router:
            return
        device = next(self.model.parameters()).device
        shape = (routers, config.n_splits, config.n_skills)
        new = torch.zeros(len(config.tasks) - config.frozen_tasks, *shape, device="meta" if on_meta else "cpu")
        if not on_meta:
            bound = _NEAR_ZERO / config.router_speed
            new = new.uniform_(-bound, bound, generator=self._generator).to(device)
        self.mhr_router[adapter] = nn.Parameter(new)
        if config.frozen_tasks:
            self.mhr_known[adapter] = torch.zeros(config.frozen_tasks, *shape, device=device)

    def _create_and_replace(  # type: ignore[override]
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **kwargs: Any,
    ) -> None:
        layer = target if isinstance(target, LinearSkills) else LinearSkills(target, self)
        layer.update_layer(
            adapter_name,
            _skills(layer, current_key, peft_config, self._generator),
            self._places[current_key],
            alpha=peft_config.alpha,
            dropout=peft_config.dropout,
            train_skills=peft_config.train_skills,
            inference_mode=peft_config.inference_mode or adapter_name not in self.active_adapters,
        )
        if layer is not target:
            self._replace_module(parent, target_name, layer, target)

    def forward(self, *args: Any, tasks: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Runs the model.

        Args:
            *args: As the model's.
            tasks: Task of each row; PEFT itself takes ``task_ids`` away, so it is another word.
            **kwargs: As the model's.

        Raises:
            DataError: A task is unknown, there is not one for each row, or none is given and there are several.
        """
        self.seen_outside_backward = False
        with ROUTING.during(self.model, self._route(tasks, args, kwargs)):
            return super().forward(*args, **kwargs)

    def generate(self, *args: Any, tasks: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Generates as the model does; rows that beams or several answers multiply keep their task."""
        with ROUTING.during(self.model, self._route(tasks, args, kwargs)):
            return self.model.generate(*args, **kwargs)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        if kwargs.get("adapter_names") is not None:
            raise ValueError("rows have no adapters of their own here, but tasks: model(..., tasks=[...])")
        yield

    def use_task(self, task: str | None) -> None:
        """Says which task rows have that name none, and which is merged and exported; None: rows must name theirs.

        Raises:
            DataError: The task is unknown.
        """
        if task is not None:
            self._place(self.active_adapters[0], [task])
        self.task = task

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks that the active adapter knows."""
        return tuple(cast(Any, self.peft_config[self.active_adapters[0]]).tasks)

    def _place(self, adapter: str, names: Sequence[str]) -> Batch:
        config: Any = self.peft_config[adapter]
        device = next(self.model.parameters()).device
        unknown = config.unknown_task if config.has_router else "uniform"
        return place_tasks(names, config.tasks, unknown=unknown, device=device)

    def _route(self, tasks: Sequence[str] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Routing]:
        """Returns for each active adapter how the pass mixes its skills."""
        if tasks is not None:
            _require_one_per_row(tasks, args, kwargs)
        routings = {}
        for adapter in self.active_adapters:
            config: Any = self.peft_config[adapter]
            names = [self._default_task(adapter)] if tasks is None else [str(task) for task in tasks]
            routing = routings[adapter] = Routing(self._place(adapter, names), None, None)
            if adapter not in self.mhr_router:
                continue
            if self.training and config.routing == "relaxed_bernoulli":
                shape = (len(routing.batch.tasks), *self.mhr_router[adapter].shape[1:])
                routing.noise = _logistic(shape, self.mhr_router[adapter].device)
            routing.weights = self._weights(adapter, routing, slice(None))
        return routings

    def _default_task(self, adapter: str) -> str:
        config: Any = self.peft_config[adapter]
        if self.task is not None or not config.has_router or len(config.tasks) == 1:
            return str(self.task if self.task is not None else (config.tasks or [""])[0])
        raise DataError(
            "the rows' tasks are not given",
            where="tasks",
            want=list_choices(config.tasks),
            fix="model(..., tasks=[...]), one name per row, model.base_model.use_task(name), or --task NAME",
        )

    def mixing(self, adapter: str, place: int) -> tuple[Tensor, Tensor]:
        """Returns the weights (U, S, K) of a layer's router for the tasks of the batch, and each row's task in it.

        Raises:
            TrainingError: Something other than transformers computes activations again, and has lost the tasks.
        """
        routing = (ROUTING.get() or self._route_outside())[adapter]
        if adapter not in self.mhr_router:
            config: Any = self.peft_config[adapter]
            even = torch.full((1, config.n_splits, config.n_skills), 1 / config.n_skills)
            return even, routing.batch.inverse
        # Weights that all layers share belong to one graph: reentrant recomputation would go through it many times.
        if routing.weights is not None and routing.weights.requires_grad and not torch.is_grad_enabled():
            routing.weights = None
        if routing.weights is None:
            return self._weights(adapter, routing, slice(place, place + 1))[:, 0], routing.batch.inverse
        return routing.weights[:, place], routing.batch.inverse

    def _route_outside(self) -> dict[str, Routing]:
        """Returns the routing of a base that is called past this tuner: there all rows have the task in use."""
        if torch._C._current_graph_task_id() != -1:
            raise TrainingError(
                "activations are computed again, and what does that has lost the tasks of the batch",
                fix="model.gradient_checkpointing_enable(), and forward passes through the PeftModel",
            )
        placed = ((adapter, [self._default_task(adapter)]) for adapter in self.active_adapters)
        return {adapter: Routing(self._place(adapter, names), None, None) for adapter, names in placed}

    def mixing_of_one(self, adapter: str, place: int) -> Tensor:
        """Returns the weights (1, S, K) of a layer's router for the task that the tuner serves now.

        Raises:
            CapabilityError: There are several, and none is chosen.
        """
        config: Any = self.peft_config[adapter]
        if adapter not in self.mhr_router:
            return torch.full((1, config.n_splits, config.n_skills), 1 / config.n_skills)
        try:
            batch = self._place(adapter, [self._default_task(adapter)])
        except DataError as error:
            raise CapabilityError(
                "weights serve one task, and the adapter knows several",
                where="task",
                want=list_choices(config.tasks),
                fix="model.base_model.use_task(name), or --task NAME",
            ) from error
        return self._weights(adapter, Routing(batch, None, None), slice(place, place + 1))[:, 0]

    def _weights(self, adapter: str, routing: Routing, places: slice) -> Tensor:
        """Returns the weights (U, R, S, K) of some routers; a task that is unknown mixes all skills alike."""
        config: Any = self.peft_config[adapter]
        router = self.mhr_router[adapter]
        parts = [self.mhr_known[adapter]] if config.frozen_tasks else []
        # Logits of zero give even weights; the row is the last, where UNKNOWN points.
        none = router.new_zeros(1, *router.shape[1:])
        logits = torch.cat([*parts, router, none])[:, places][routing.batch.tasks] * config.router_speed
        noise = None if routing.noise is None else routing.noise[:, places]
        return mixing_weights(gates(logits, noise=noise, rounded=config.routing == "straight_through"))


def _require_one_per_row(tasks: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks that there is a task for each row of what the model takes."""
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), kwargs.get("inputs"), *args[:1])
    rows = next((len(value) for value in given if value is not None), None)
    if isinstance(tasks, str) or rows not in (None, len(tasks)):
        raise DataError(
            "there is not one task for each row",
            where="tasks",
            got=f"the text {tasks!r}" if isinstance(tasks, str) else f"{len(tasks)} tasks",
            want="a list of names" if rows is None else f"a list of {rows} names",
        )


def _places(layers: dict[str, nn.Module], config: SkillsConfig) -> dict[str, int]:
    """Returns the number of each layer's router."""
    numbers: dict[str, int] = {}
    return {name: numbers.setdefault(_scope(name, config.granularity), len(numbers)) for name in layers}


def _scope(name: str, granularity: str) -> str:
    if granularity == "model":
        return ""
    if granularity == "block":
        found = re.match(r".*?\.\d+(?=\.)", name)
        return found.group() if found else name
    return name.rpartition(".")[0] if granularity == "sublayer" else name


def _skills(layer: LinearSkills, name: str, config: SkillsConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    splits, skills, r = config.n_splits, config.n_skills, config.r
    for width in (layer.in_features, layer.out_features):
        if width % splits:
            raise TargetError(
                f"{splits} splits do not divide the width {width} of {name}",
                where="method.n_splits",
                want=f"a divisor of {width}",
            )
    device = next(layer.get_base_layer().parameters()).device
    first = torch.empty(splits, skills, layer.in_features // splits, r)
    # The bound of the whole width, as in the reference: a part is not wider for being short.
    bound = 1 / math.sqrt(3 * layer.in_features)
    first.uniform_(-bound, bound, generator=generator)
    second = torch.zeros(splits, skills, layer.out_features // splits, r)
    return first.to(device), second.to(device)


def _logistic(shape: tuple[int, ...], device: torch.device) -> Tensor:
    uniform = torch.rand(shape, device=device).clamp_(1e-6, 1 - 1e-6)
    return torch.logit(uniform)


SKILLS = register_tuner("mhr", SkillsConfig, SkillsTuner)
