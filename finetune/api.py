"""The Python API: five functions, the same words as the recipe's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.errors import CapabilityError, CheckpointError
from finetune.core.routing import use_task
from finetune.methods import Method, build_method

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn
    from transformers import PreTrainedModel

    from finetune.training.run import RunResult

__all__ = ["load", "method", "reflect", "select", "train"]


def method(name: str, **config: Any) -> Method:
    """Returns the method of that name, to be attached to a model.

    Args:
        name: Registry name (``finetune ls methods``).
        **config: The keys of a recipe's ``method`` section.

    Raises:
        RegistryError: The name is unknown.
        ConfigError: A key is unknown or its value is not accepted.
        CapabilityError: The method cannot fine-tune a causal LM here.

    Example:
        >>> s2ft = finetune.method("s2ft", ratio=0.02)
        >>> model = s2ft.attach(model)
    """
    return build_method({"name": name, **config})


def load(base: str | PreTrainedModel, folder: str | Path, *, task: str | None = None, **options: Any) -> nn.Module:
    """Returns the tuned model: the base with the learned state in ``folder``, in evaluation mode.

    What was learned in the base's own weights is written into them, and the result is a plain Hugging Face model. An
    adapter gives a ``PeftModel``.

    Args:
        base: What ``model.name_or_path`` of a recipe may be, or a loaded model, which is changed in place.
        folder: What :meth:`finetune.methods.Method.save` or a run's ``final`` wrote, or an adapter of stock PEFT.
        task: Which task rows have that name none, where what was learned tells tasks apart.
        **options: As for :func:`finetune.models.load_model`, where ``base`` is a name; a ``dtype`` that is not given is
            float32 where the base was trained in it.

    Raises:
        CheckpointError: The state is missing, damaged, incomplete, or belongs to another base.
        ConfigError: The base cannot be loaded.
        CapabilityError: A task is given, and what was learned does not tell tasks apart.
        DataError: The task is unknown.
    """
    model = _load(base, Path(folder), options)
    if task is not None and not use_task(model, task):
        raise CapabilityError("what was learned does not tell tasks apart", where="task", got=task)
    return model


def _load(base: str | PreTrainedModel, folder: Path, options: dict[str, Any]) -> nn.Module:
    from finetune.core.learned_state import (
        DELTA,
        DELTA_CONFIG,
        LEFT,
        apply_learned_state,
        learned_names,
        read_learned_state,
    )
    from finetune.export.log import BASE_HASH, replay_log
    from finetune.methods.primitives.peft_files import ADAPTER_CONFIG, load_adapter
    from finetune.methods.state import read_method_file

    if (folder / ADAPTER_CONFIG).is_file():
        model = _base_model(base, read_method_file(folder), folder, options)
        return _evaluating(load_adapter(model, folder))
    if (folder / DELTA_CONFIG).is_file():
        tensors, metadata = read_learned_state(folder)
        model = _base_model(base, metadata, folder, options)
        if BASE_HASH in metadata:
            return _evaluating(replay_log(model, tensors, metadata, folder))
        weights = (model.get_parameter(name) for name in learned_names(tensors))
        quantised = any(key.endswith(DELTA) for key in tensors) and not all(w.is_floating_point() for w in weights)
        if quantised or any(key.endswith(LEFT) for key in tensors):
            # What a weight cannot take up, or only rounded, stays beside it.
            config = metadata["config"]
            several = isinstance(config, list)
            beside = build_method(config if several else {"name": metadata["method"], **config})
            return _evaluating(beside.attach(model, candidates=metadata.get("scope"), learned=folder))
        apply_learned_state(model, tensors, metadata, folder)
        return _evaluating(model)
    raise CheckpointError(
        "the folder holds no learned state",
        where=str(folder),
        want=f"{ADAPTER_CONFIG} or {DELTA_CONFIG}",
        fix="the final folder of a run",
    )


def _evaluating(model: nn.Module) -> nn.Module:
    return model.train(False)


def _base_model(
    base: str | PreTrainedModel, metadata: dict[str, Any], folder: Path, options: dict[str, Any]
) -> PreTrainedModel:
    """Returns the base, untied where it was trained untied, after comparing it with the recorded fingerprint.

    A base that was trained in float32 is loaded in float32: rounded, it would be another one.
    """
    from finetune.core.fingerprint import base_fingerprint, is_tied
    from finetune.models import load_model

    if metadata.get("base_dtype") == "float32" and options.get("dtype", "auto") == "auto":
        options = {**options, "dtype": "float32"}
    model = load_model(base, **options) if isinstance(base, str) else base
    if isinstance(base, str) and is_tied(model) and metadata.get("tied") is False:
        model = load_model(base, **{**options, "tied": "untie"})
    recorded = metadata.get("base_fingerprint")
    if recorded is not None and base_fingerprint(model) != recorded:
        raise CheckpointError(
            "the learned state belongs to another base model",
            where=str(folder),
            got=base if isinstance(base, str) else str(model.config._name_or_path),
            want=str(metadata.get("base_model") or f"a model with fingerprint {recorded}"),
        )
    return model


def reflect(
    dataset: Dataset,
    *,
    model: str | Mapping[str, Any],
    teacher: str | Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    output_dir: str | Path | None = None,
    **rules: Any,
) -> Dataset:
    """Returns the rows of a data set as a teacher rewrote them, where the model itself prefers that.

    Args:
        dataset: Rows of any form that training takes, each an instruction with an answer.
        model: The student: a name, or the keys of a recipe's ``model`` section.
        teacher: Who rewrites: a model on this machine, or the keys of a recipe's ``reflect`` section that name an
            endpoint (``{"endpoint": ..., "model": ...}``). None is the student.
        data: Keys of a recipe's ``data`` section besides ``train``.
        output_dir: Where answers, scores, manifest and report are kept; an interrupted reflection is gone on with
            there. None keeps nothing.
        **rules: The other keys of a recipe's ``reflect`` section.

    Returns:
        One row per row that is kept: ``messages``, their ``origin`` (``original``, ``instruction``, ``response`` or
        ``both``), the ``id`` of the row that they come from, ``ifd`` and ``r_ifd``.

    Raises:
        FinetuneError: Whatever is wrong with the keys, the rows, the teacher or the model.

    Example:
        >>> teacher = {"endpoint": "http://localhost:8000/v1", "model": "my-70b"}
        >>> better = finetune.reflect(dataset, model="Qwen/Qwen2.5-0.5B", teacher=teacher, keep="all")
    """
    from finetune.selection.dataset import reflect_dataset

    return reflect_dataset(dataset, model=model, teacher=teacher, data=data, output_dir=output_dir, **rules)


def select(
    dataset: Dataset,
    scorer: str | Mapping[str, Any] = "ifd",
    *,
    model: str | Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
    output_dir: str | Path | None = None,
    **rules: Any,
) -> Dataset:
    """Returns the rows of a data set that are worth training on, in their order and with all their columns.

    Args:
        dataset: Rows of any form that training takes.
        scorer: Registry name (``finetune ls selectors``), or ``{"name": ..., and its own keys}``.
        model: The model that scores: a name, or the keys of a recipe's ``model`` section.
        data: Keys of a recipe's ``data`` section besides ``train``.
        output_dir: Where scores, manifest and report are kept; an interrupted selection is gone on with there. None
            keeps nothing.
        **rules: The other keys of a recipe's ``select`` section: how many rows are kept, and which.

    Raises:
        FinetuneError: Whatever is wrong with the keys, the rows or the model.

    Example:
        >>> kept = finetune.select(dataset, "ifd", model="Qwen/Qwen2.5-0.5B", fraction=0.2, duplicates="near")
    """
    from finetune.selection.dataset import select_dataset

    return select_dataset(dataset, scorer, model=model, data=data, output_dir=output_dir, **rules)


def train(recipe: str | Path | Sequence[str], *overrides: str) -> RunResult:
    """Runs a recipe as ``finetune train`` does, and returns how it ended.

    Args:
        recipe: One recipe file or shipped name, or several, the later ones winning.
        *overrides: ``key=value``.

    Raises:
        FinetuneError: Whatever is wrong with the recipe, the data, the model or the method.

    Example:
        >>> finetune.train("quickstart", "output_dir=runs/mine").folder
    """
    from finetune.config.load import load_recipe
    from finetune.training.run import train as run

    recipes = [str(recipe)] if isinstance(recipe, str | Path) else list(recipe)
    return run(load_recipe(recipes, overrides))
