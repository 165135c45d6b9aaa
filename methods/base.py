"""What a method is: it decides which parameters of a model train, and nothing else.

This module, like every module of a method, is imported by ``finetune ls methods`` and ``finetune validate``, which must
answer in half a second: torch, transformers and peft are imported inside the functions that need them, and autograd
functions live in :mod:`finetune.methods.primitives`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from finetune.core.errors import CapabilityError, TrainingError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import TrainerCallback, TrainingArguments

__all__ = ["FILE", "Calibration", "Kind", "Method", "MethodConfig", "MethodSummary"]

Calibration: TypeAlias = "Collection[Mapping[str, torch.Tensor]]"
FILE: dict[str, Any] = {"format": "path"}
"""Of a config's field that names a file, or a list of them (``json_schema_extra=FILE``): a run's copy of the recipe
names them by absolute paths."""
Kind = Literal["adapter", "delta", "subset"]
"""What is learned: modules added by PEFT, entries or slices of the base's own weights, or whole tensors of them."""

CHOSEN_BEFORE: Calibration = []
"""In place of calibration batches where a learned state will say what was chosen."""


class MethodConfig(BaseModel):
    """Base of the methods' configs: the keys of a recipe's ``method`` section besides ``name``.

    Every field has a default and a description; unknown keys and values of another type are errors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True)
class MethodSummary:
    """What a method trains.

    Attributes:
        name: Registry name.
        trained: Number of scalars that receive updates.
        total: Number of scalars of the base model, a shared tensor counted once.
        trained_bytes: Bytes of the trained parameters as the optimizer holds them.
        chosen: Human-readable lines: what was chosen and why.
    """

    name: str
    trained: int
    total: int
    trained_bytes: int
    chosen: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Trained over total, in [0, 1]."""
        return self.trained / self.total


class _Owned(list["Method"]):
    """Keeps methods alive for as long as their model; a copy of the model is attached to none."""

    def __reduce__(self) -> tuple[type[_Owned], tuple[()]]:
        return _Owned, ()


class Method(ABC):
    """A way to fine-tune: :meth:`attach` it to a model, train the model with anything, :meth:`save` what was learned.

    After :meth:`attach`, what trains is the set of parameters with ``requires_grad=True``, and nothing else; any
    loop and any optimizer trains it. A subclass defines the class attributes, :meth:`_attach` and the state.

    Attributes:
        name: Registry name, set by ``@register``.
        family: Folder of :mod:`finetune.methods` that the method lives in, set by ``@register``.
        paper: Citation with an identifier, or an empty string.
        kind: What is learned.
        narrows_added: Whether the method can choose among parameters that an earlier method added to the model.
        narrows_entries: Whether it can train the entries of weights that an earlier method chose.
        recomputes: Whether it trains with activations that are computed again in the backward pass.
        takes_turns: Whether parameters that train may rest for some steps.
        shards: Whether FSDP2 takes apart what trains with the rest; otherwise every process has it whole.
        whole_weights: Why every process needs the model's weights in one piece, or an empty string.
        own_optimizer: Why it must see the optimizer and the gradients as they are, or an empty string; ZeRO hides both.
        whole_earlier: Why it needs what an earlier method added or chose in one piece, or an empty string.
        stock: Whether stock PEFT loads what it saves.
        routes: Whether it tells the rows of a batch apart by their task: ``model(..., tasks=[...])``.
        model: The model after :meth:`attach`.
        earlier: The attached method whose parameters this one trains, in a composition.
    """

    name: ClassVar[str] = ""
    family: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    kind: ClassVar[Kind]
    narrows_added: ClassVar[bool] = False
    narrows_entries: ClassVar[bool] = False
    recomputes: ClassVar[bool] = True
    takes_turns: ClassVar[bool] = False
    shards: ClassVar[bool] = False
    whole_weights: ClassVar[str] = ""
    own_optimizer: ClassVar[str] = ""
    whole_earlier: ClassVar[str] = ""
    stock: ClassVar[bool] = False
    routes: ClassVar[bool] = False
    Config: ClassVar[type[MethodConfig]] = MethodConfig

    def __init__(self, config: MethodConfig | None = None) -> None:
        self.config = config if config is not None else self.Config()
        self._model: nn.Module | None = None
        self._base_fingerprint = ""
        self._base_dtype = ""
        self._tied = False
        self._total = 0
        self._calibration: Calibration | None = None
        self._chosen_before = False
        self.earlier: Method | None = None

    @property
    def model(self) -> nn.Module:
        """The model that this method is attached to.

        Raises:
            TrainingError: The method is not attached yet.
        """
        if self._model is None:
            raise TrainingError(f"method {self.name!r} is not attached", fix="model = method.attach(model)")
        return self._model

    @property
    def attached(self) -> bool:
        """Whether the method is attached to a model; after :meth:`merge` it is not any more."""
        return self._model is not None

    @property
    def writes_base(self) -> bool:
        """Whether training changes the base's own weights, which cannot be done to quantised ones."""
        return self.kind != "adapter"

    @property
    def needs_options(self) -> bool:
        """Whether each row of a batch has to come with its question's other options."""
        return False

    @property
    def same_rows(self) -> int:
        """How many processes in a row are given the same rows of every batch."""
        return 1

    def calibration_examples(self, total: int) -> int:
        """Returns how many of ``total`` training examples the choice of what trains looks at; 0 where it needs none."""
        return 0

    def attach(
        self,
        model: nn.Module,
        *,
        candidates: Iterable[str] | None = None,
        calibration: Calibration | None = None,
        learned: str | Path | None = None,
    ) -> nn.Module:
        """Freezes ``model`` but for what this method trains, and returns the model to train.

        Args:
            model: A plain transformers causal LM; it is changed in place, never its weights' values.
            candidates: Names of the parameters that the method may choose from; None means all of them.
            calibration: Batches as the model takes them (``input_ids``, ``labels``, ``attention_mask``: int64 (B, T)),
                on any device, for methods that choose by what the model does on data. They may be gone through several
                times.
            learned: A folder that :meth:`save` wrote: what was chosen and learned is loaded, nothing is chosen anew, so
                that no calibration is needed.

        Returns:
            The model to train: ``model`` itself, or the module that wraps it.

        Raises:
            CapabilityError: The method chooses by data, and there is no calibration.
            CheckpointError: ``learned`` does not fit.
            TargetError: A pattern matched nothing, or something that the method cannot train.
            TrainingError: Nothing would train, or the method is attached already.
        """
        from finetune.core.fingerprint import base_fingerprint, count_parameters, is_tied

        if self._model is not None:
            raise TrainingError(f"method {self.name!r} is attached already", fix="build a new one for a new model")
        if learned is not None:
            calibration = CHOSEN_BEFORE
        self._require_calibration(model, calibration)
        every = (name for name, _ in model.named_parameters())
        allowed = frozenset(every if candidates is None else candidates)
        self._base_fingerprint = base_fingerprint(model)
        self._base_dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        self._tied = is_tied(model)
        self._total = count_parameters(model)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self._calibration = calibration or None
        self._chosen_before = calibration is CHOSEN_BEFORE
        try:
            self._model = self._attach(model, allowed)
        finally:
            self._calibration = None
        if learned is not None:
            self.load(learned)
        if not self.trained_parameters():
            raise TrainingError(f"method {self.name!r} leaves nothing to train in this model", fix="widen its targets")
        # Whoever keeps only the model trains all the same.
        self._model.__dict__.setdefault("_methods", _Owned()).append(self)
        return self._model

    def _require_calibration(self, model: nn.Module, calibration: Calibration | None) -> None:
        # Without weights (a dry run) there is nothing to score: how much is chosen is known all the same.
        weightless = any(parameter.is_meta for parameter in model.parameters())
        if calibration or calibration is CHOSEN_BEFORE or weightless or not self.calibration_examples(1):
            return
        raise CapabilityError(
            f"{self.name!r} chooses what trains by data, and was given none",
            where="calibration",
            got="no batches",
            want="batches with input_ids and labels",
            fix="method.attach(model, calibration=batches)",
        )

    @abstractmethod
    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        """Sets up a wholly frozen ``model`` so that just what this method trains requires gradients.

        ``self._calibration`` holds the batches to choose by. None there means that nothing is chosen by data: a learned
        state will say what was chosen, or there are no weights. ``self._chosen_before`` says that a learned state will.
        """

    def bind(self, *, total_steps: int) -> None:  # noqa: B027 - most methods do not care
        """Tells the attached method how many optimizer steps the run has; for those whose choice follows a schedule."""

    def check_arguments(self, arguments: TrainingArguments) -> None:  # noqa: B027 - most methods train under any
        """Checks what the trainer of transformers is told.

        Raises:
            CapabilityError: The method cannot train so.
        """

    def name_tasks(self, tasks: Sequence[str], *, asked: Mapping[str, str] | None = None) -> None:  # noqa: B027
        """Tells a method that routes, before it is attached, what it will be asked.

        Args:
            tasks: Names of the training rows' tasks.
            asked: Names of tasks that it will be measured on, and where they come from.

        Raises:
            DataError: It would refuse a task.
        """

    def use_task(self, task: str | None) -> None:
        """Says which task rows have that name none, and which is merged and exported.

        Raises:
            CapabilityError: The method does not tell tasks apart.
            DataError: The task is unknown.
        """
        raise CapabilityError(f"{self.name!r} does not tell tasks apart", where="task", got=str(task))

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that train, by their name in :attr:`model`, in order."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def learned_tensors(self) -> dict[str, torch.Tensor]:
        """Returns, by name, what a few steps must have changed: what trains, unless it stands for something else."""
        return {name: parameter.detach() for name, parameter in self.trained_parameters().items()}

    def at_rest(self) -> frozenset[str]:
        """Returns which trained parameters rightly have no gradient after this step's backward passes."""
        return frozenset()

    def averages(self) -> frozenset[str]:
        """Returns whose gradients the method itself averages over processes that share a model by FSDP2."""
        return frozenset()

    def write_values(self) -> None:  # noqa: B027 - most methods train what the forward pass reads
        """Makes the forward pass see the values of the trained parameters, where others than the optimizer set them."""

    def touched(self) -> frozenset[str]:
        """Returns the names of the base's own parameters whose values training may change."""
        return frozenset(key.rpartition(".")[0] for key in self.state_dict()) if self.kind != "adapter" else frozenset()

    def saved_scalars(self) -> int:
        """Returns how many scalars a saved state has at least: those that have been trained so far."""
        return self.summary().trained

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns name and shape of what trains as the memory estimate is to place it."""
        return {name: tuple(parameter.shape) for name, parameter in self.trained_parameters().items()}

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns what was learned: O(trained), detached, enough to resume training exactly."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores :meth:`state_dict`, including what was chosen; strict.

        Raises:
            CheckpointError: A tensor is missing, unexpected or of another shape.
        """

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Writes what was learned and how to read it into ``folder`` (made if absent), whole or not at all."""

    @abstractmethod
    def load(self, folder: str | Path) -> None:
        """Restores what :meth:`save` wrote into the attached model.

        Raises:
            CheckpointError: ``folder`` holds the state of another method or base, or is damaged.
        """

    @abstractmethod
    def merge(self) -> nn.Module:
        """Detaches the method and returns the plain Hugging Face model, tuned, in the base's dtype."""

    def export_adapter(self, folder: str | Path) -> None:
        """Writes what was learned as an adapter that stock PEFT loads; a method whose update is low-rank overrides it.

        The method is attached, and :meth:`load` has restored what was learned.

        Raises:
            CapabilityError: The update of this method has no such form.
        """
        raise CapabilityError(
            f"the update of {self.name!r} is not low-rank, so it is no PEFT adapter",
            got=str(folder),
            want="merged or safetensors",
            fix="finetune merge RUN OUT",
        )

    def draw(self, folder: Path) -> None:  # noqa: B027 - most methods have nothing to show
        """Writes pictures of what was chosen, and why, into ``folder``; a run's page shows them by their file names."""

    def callbacks(self) -> list[TrainerCallback]:
        """Returns what stock ``transformers.Trainer`` needs for exact small checkpoints: one callback."""
        from finetune.methods.callback import MethodCallback

        return [MethodCallback(self)]

    def summary(self) -> MethodSummary:
        """Returns what trains, in numbers and words."""
        trained = self.trained_parameters().values()
        return MethodSummary(
            name=self.name,
            trained=sum(p.numel() for p in trained),
            total=self._total,
            trained_bytes=sum(p.numel() * p.element_size() for p in trained),
            chosen=self._chosen(),
        )

    def _chosen(self) -> tuple[str, ...]:
        return ()

    def metadata(self) -> dict[str, Any]:
        """Returns what is stored beside the learned state: method, config, and which base it belongs to."""
        from finetune import __version__

        return {
            "method": self.name,
            "config": self.config.model_dump(mode="json"),
            "kind": self.kind,
            "base_model": getattr(getattr(self.model, "config", None), "_name_or_path", ""),
            "base_fingerprint": self._base_fingerprint,
            "base_dtype": self._base_dtype,
            "tied": self._tied,
            "finetune_version": __version__,
        }
