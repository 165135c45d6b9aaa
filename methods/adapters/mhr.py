"""Poly and MHR: low-rank skills that each task mixes with weights of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic import Field

from finetune.core.errors import ConfigError, DataError, list_choices, nearest
from finetune.methods.base import FILE, MethodConfig
from finetune.methods.low_rank_adapter import LowRankAdapter, LowRankAdapterConfig
from finetune.methods.registry import register

if TYPE_CHECKING:
    from torch import nn

    from finetune.methods.primitives.earlier_skills import EarlierSkills
    from finetune.methods.primitives.skill_tuner import SkillsTuner

__all__ = ["MHR", "MHRConfig"]

_SHAPE = ("r", "n_skills", "n_splits", "granularity", "routing", "router_speed", "alpha")
_PLACE = ("target_modules", "exclude_modules", "layers_to_transform")


class MHRConfig(LowRankAdapterConfig):
    """How many skills there are, how finely they are mixed, and what a new task starts from.

    What is left at null follows from ``start``, or has the default that its description names.
    """

    tasks: list[str] = Field(default=[], description="Names of the tasks; empty: those of the training rows.")
    r: int | None = Field(default=None, ge=1, description="Rank of a task's update; null: 4.")
    n_skills: int | None = Field(default=None, ge=1, description="Skills of each layer; null: 8.")
    n_splits: int | None = Field(
        default=None,
        ge=1,
        description="Parts of each factor that are mixed apart, a divisor of all widths; 1: Poly; null: 4.",
    )
    granularity: Literal["linear", "sublayer", "block", "model"] | None = Field(
        default=None,
        description="What has a router of its own: a layer, attention or feed-forward, a block, all; null: linear.",
    )
    routing: Literal["sigmoid", "relaxed_bernoulli", "straight_through", "uniform"] | None = Field(
        default=None,
        description="Gates of the skills: as they are, sampled while training, rounded, or all skills alike; null: "
        "sigmoid.",
    )
    router_speed: float | None = Field(
        default=None,
        gt=0,
        description="How many times faster than the skills the router's logits move under Adam; null: 100, as "
        "published.",
    )
    alpha: float | None = Field(  # type: ignore[assignment]
        default=None, gt=0, description="The update is multiplied by alpha over the rank; null: 16."
    )
    target_modules: list[str] | str | None = Field(  # type: ignore[assignment]
        default=None,
        description="Names of the layers that are adapted, or a regular expression, as PEFT's; null: all-linear.",
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

    def __init__(self, config: MethodConfig | None = None) -> None:
        from finetune.methods.primitives.earlier_skills import EarlierSkills

        given = cast(MHRConfig, config or MHRConfig())
        self._earlier = None if given.start is None else EarlierSkills(Path(given.start))
        super().__init__(_complete(given, self._earlier))

    def _peft_type(self) -> Any:
        from finetune.methods.primitives.skill_tuner import SKILLS

        return SKILLS

    def name_tasks(self, tasks: Sequence[str], *, asked: Mapping[str, str] | None = None) -> None:
        """Takes the tasks of the training rows, where the config names none, and checks all that will be asked."""
        if not self.config.tasks:
            self.config = self.config.model_copy(update={"tasks": list(tasks)})
        config = self._peft_config({})
        _refuse_again(config.tasks[: config.frozen_tasks], tasks, "data.train")
        for task, where in {**dict.fromkeys(tasks, "data.train"), **(asked or {})}.items():
            if config.has_router and config.unknown_task == "error" and task not in config.tasks:
                raise DataError(
                    f"no router is trained for the task {task!r}",
                    where=where,
                    want=list_choices(config.tasks),
                    near=nearest(task, config.tasks),
                    fix="that name as `task` of the source, of its rows or of the task file, or "
                    "method.unknown_task: uniform",
                )

    def use_task(self, task: str | None) -> None:
        """Says which task rows have that name none, and which is merged and exported."""
        self._tuner.use_task(task)

    @property
    def _tuner(self) -> SkillsTuner:
        return cast("SkillsTuner", cast(Any, self.model).base_model)

    def _peft_config(self, found: Mapping[str, Any]) -> Any:
        from finetune.methods.primitives.skill_tuner import SkillsConfig

        given = {name: value for name, value in self.config if name not in ("start", "adapt")}
        return SkillsConfig(task_type="CAUSAL_LM", **{**given, **self._what_adapts(), **found})

    def _what_adapts(self) -> dict[str, Any]:
        """Returns the settings that differ from the earlier run's because only a part of it trains."""
        if self._earlier is None or self.config.adapt == "full":
            return {}
        if self.config.adapt == "mu":
            return {"n_skills": 1, "n_splits": 1}
        earlier = self._earlier.config["tasks"]
        _refuse_again(earlier, self.config.tasks, "method.tasks")
        return {"tasks": [*earlier, *self.config.tasks], "frozen_tasks": len(earlier), "train_skills": False}

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        adapted = super()._attach(model, candidates)
        if self._earlier is not None:
            if not any(parameter.is_meta for parameter in adapted.parameters()):
                self._earlier.require_base(self._base_fingerprint)
            self._earlier.write_into(cast(Any, adapted).base_model, mean=self.config.adapt == "mu")
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


def _complete(config: MHRConfig, earlier: EarlierSkills | None) -> MHRConfig:
    """Returns the config with the shape and the place of the earlier run's skills, or with the defaults."""
    from finetune.methods.primitives.skill_tuner import SkillsConfig

    if earlier is None:
        if config.adapt != "full":
            raise ConfigError(
                "there is nothing to adapt", where="method.adapt", fix="method.start: the final folder of an mhr run"
            )
        usual: dict[str, Any] = {**vars(SkillsConfig()), "target_modules": "all-linear"}
    else:
        usual = earlier.config
        _require_shape(config, earlier)
    absent = [name for name in (*_SHAPE, *_PLACE) if getattr(config, name) is None]
    return config.model_copy(update={name: usual[name] for name in absent})


def _require_shape(config: MHRConfig, earlier: EarlierSkills) -> None:
    for name in _SHAPE:
        ours, theirs = getattr(config, name), earlier.config[name]
        if ours not in (None, theirs):
            raise ConfigError(
                "the skills that are adapted were trained with another value",
                where=f"method.{name}",
                got=str(ours),
                want=str(theirs),
                fix="leave it out, or train anew without method.start",
            )
    if config.adapt == "z" and not earlier.has_router:
        raise ConfigError(
            "the earlier run mixed its skills for all tasks alike, so there are no gates to train",
            where="method.adapt",
            got="z",
            want="full or mu",
            fix="method.adapt: full, or start from a run whose tasks have gates",
        )


def _refuse_again(earlier: Sequence[str], tasks: Sequence[str], where: str) -> None:
    if again := sorted(set(earlier) & set(tasks)):
        raise ConfigError(
            "the earlier run has trained this task, and its gates stay as they are",
            where=where,
            got=list_choices(again),
            fix="method.adapt: full, or another name as `task` of the source",
        )
