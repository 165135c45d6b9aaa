"""Poly and MHR: low-rank skills that each task mixes with weights of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic import Field

from finetune.core.errors import CheckpointError, ConfigError, list_choices
from finetune.methods.base import FILE, MethodConfig
from finetune.methods.low_rank_adapter import LowRankAdapter, LowRankAdapterConfig
from finetune.methods.registry import register

if TYPE_CHECKING:
    from torch import Tensor, nn

    from finetune.methods.primitives.skill_tuner import SkillsTuner

__all__ = ["MHR", "MHRConfig"]

_SHAPE = ("r", "n_skills", "n_splits", "granularity", "routing", "router_speed", "alpha")
_PLACE = ("target_modules", "exclude_modules", "layers_to_transform")


class MHRConfig(LowRankAdapterConfig):
    """How many skills there are, how finely they are mixed, and what a new task starts from."""

    tasks: list[str] = Field(default=[], description="Names of the tasks; empty: those of the training rows.")
    r: int = Field(default=4, ge=1, description="Rank of a task's update.")
    n_skills: int = Field(default=8, ge=1, description="Skills of each layer.")
    n_splits: int = Field(
        default=4, ge=1, description="Parts of each factor that are mixed apart, a divisor of all widths; 1: Poly."
    )
    granularity: Literal["linear", "sublayer", "block", "model"] = Field(
        default="linear", description="What has a router of its own: a layer, attention or feed-forward, a block, all."
    )
    routing: Literal["sigmoid", "relaxed_bernoulli", "straight_through", "uniform"] = Field(
        default="sigmoid",
        description="Gates of the skills: as they are, sampled while training, rounded, or all skills alike.",
    )
    router_speed: float = Field(
        default=100.0,
        gt=0,
        description="How many times faster than the skills the router's logits move under Adam; published: 100.",
    )
    unknown_task: Literal["error", "uniform"] = Field(
        default="error", description="Rows of a task that was not trained: refused, or all skills mixed alike."
    )
    start: str | None = Field(
        default=None,
        description="Final folder of an earlier mhr run, whose skills are adapted to new tasks.",
        json_schema_extra=FILE,
    )
    adapt: Literal["full", "z", "mu"] = Field(
        default="full",
        description="What trains from start: skills and fresh router; that alone (MHR-z); the skills' mean (MHR-mu).",
    )


@register("mhr")
class MHR(LowRankAdapter):
    """Multi-head routing: per layer K low-rank skills, of which each task mixes its factors, split by split.

    ``A_t = concat_s sum_k w_t[s, k] A[s, k]``, B alike, ``w`` the task's gates, normalised in each split. Costs what
    LoRA of rank r costs, and mixing once per task of a batch; trains K times LoRA's parameters. One split is Poly.

    From ``start`` a new task is learned with few examples: ``adapt: z`` trains only its gates, and the earlier tasks
    stay what they were; ``adapt: mu`` trains the mean of the skills, which is plain LoRA and, under Adam, the same as
    training all of them mixed alike.

    References:
        Caccia et al., "Multi-Head Adapter Routing for Cross-Task Generalization", arXiv 2211.03831, section 3.
        Ponti et al., "Combining Modular Skills in Multitask Learning", arXiv 2202.13914, section 3.
    """

    paper: ClassVar[str] = "arXiv 2211.03831"
    routes: ClassVar[bool] = True
    Config: ClassVar[type[MethodConfig]] = MHRConfig
    config: MHRConfig

    def _peft_type(self) -> Any:
        from finetune.methods.primitives.skill_tuner import SKILLS

        return SKILLS

    def name_tasks(self, tasks: Sequence[str]) -> None:
        """Takes the tasks of the training rows, where the config names none."""
        if not self.config.tasks:
            self.config = self.config.model_copy(update={"tasks": list(tasks)})

    def use_task(self, task: str | None) -> None:
        """Says which task rows have that name none, and which is merged and exported."""
        self._tuner.use_task(task)

    @property
    def _tuner(self) -> SkillsTuner:
        return cast("SkillsTuner", cast(Any, self.model).base_model)

    def _peft_config(self, found: Mapping[str, Any]) -> Any:
        from finetune.methods.primitives.skill_tuner import SkillsConfig

        given = {name: value for name, value in self.config if name not in ("start", "adapt")}
        if self.config.start is not None:
            given |= self._started(self.config.start)
        elif "adapt" in self.config.model_fields_set:
            raise ConfigError(
                "there is nothing to adapt", where="method.adapt", fix="method.start: the final folder of an mhr run"
            )
        return SkillsConfig(task_type="CAUSAL_LM", **{**given, **found})

    def _started(self, start: str) -> dict[str, Any]:
        """Returns the settings that follow from the earlier run and from what is to train."""
        earlier = _read_config(start)
        settings = {name: earlier[name] for name in (*_SHAPE, *_PLACE)}
        for name in settings.keys() & self.config.model_fields_set:
            ours = getattr(self.config, name)
            if ours != settings[name] and not (isinstance(ours, list) and set(ours) == set(settings[name] or ())):
                raise ConfigError(
                    "the skills that are adapted were trained with another value",
                    where=f"method.{name}",
                    got=str(ours),
                    want=str(settings[name]),
                    fix="leave it out, or train anew without method.start",
                )
        if self.config.adapt == "mu":
            return {**settings, "n_skills": 1, "n_splits": 1}
        if self.config.adapt == "full":
            return settings
        if again := sorted(set(earlier["tasks"]) & set(self.config.tasks)):
            raise ConfigError(
                "the earlier run has trained this task",
                where="method.tasks",
                got=list_choices(again),
                fix="method.adapt: full, or another name",
            )
        tasks = [*earlier["tasks"], *self.config.tasks]
        return {**settings, "tasks": tasks, "frozen_tasks": len(earlier["tasks"]), "train_skills": False}

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        adapted = super()._attach(model, candidates)
        if self.config.start is not None and not any(p.is_meta for p in adapted.parameters()):
            _start_from(cast(Any, adapted).base_model, Path(self.config.start), mean=self.config.adapt == "mu")
        return adapted

    def merge(self) -> nn.Module:
        """Adds the update of the task in use to the base, and returns the plain model.

        Raises:
            CapabilityError: There are several tasks, and :meth:`use_task` has named none.
        """
        self._tuner.mixing_of_one("default", 0)
        return super().merge()

    def _chosen(self) -> tuple[str, ...]:
        config = cast(Any, self.model).active_peft_config
        trained = config.tasks[config.frozen_tasks :]
        of = f"{config.n_skills} skills in {config.n_splits} splits"
        return (*super()._chosen(), f"{of}, mixed for {len(trained)} tasks: {list_choices(trained)}")


def _read_config(start: str) -> dict[str, Any]:
    from finetune.methods.primitives.peft_files import ADAPTER_CONFIG

    path = Path(start) / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{ADAPTER_CONFIG} is missing", where=start, want="the final folder of an mhr run")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if config.get("peft_type") != "MHR":
        raise CheckpointError(
            "the skills to adapt are not there", where=start, got=str(config.get("peft_type")), want="an mhr run"
        )
    return config


def _start_from(tuner: SkillsTuner, folder: Path, *, mean: bool) -> None:
    """Writes the earlier skills, or their mean, into the layers, and the earlier tasks' gates beside the new ones."""
    import torch

    from finetune.methods.primitives.peft_files import read_adapter
    from finetune.methods.primitives.skill_layer import LinearSkills

    earlier = read_adapter(folder)
    with torch.no_grad():
        for name, layer in tuner.model.named_modules():
            if isinstance(layer, LinearSkills):
                for part in ("mhr_a", "mhr_b"):
                    own: Tensor = getattr(layer, part)["default"]
                    skills = _found(earlier, f"base_model.model.{name}.{part}", folder)
                    own.copy_(skills.mean(1).view_as(own) if mean else skills)
        if "default" in tuner.mhr_known:
            known = [earlier[key] for key in ("base_model.mhr_known", "base_model.mhr_router") if key in earlier]
            tuner.mhr_known["default"].copy_(torch.cat(known))


def _found(tensors: Mapping[str, Tensor], name: str, folder: Path) -> Tensor:
    if name not in tensors:
        raise CheckpointError("the earlier run has not adapted a layer", where=str(folder), got=name)
    return tensors[name]
