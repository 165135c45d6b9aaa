"""A tuned model from where a run left it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.errors import CapabilityError, CheckpointError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

__all__ = ["base_of", "load_tuned", "state_folder"]


def state_folder(target: Path) -> Path:
    """Returns the folder with the learned state: ``target`` itself, or its ``final``.

    Raises:
        CheckpointError: The run has not ended, so it has no ``final``.
    """
    if (target / "run.json").is_file():
        if not (target / "final").is_dir():
            raise CheckpointError(
                "the run has no final state",
                where=str(target),
                fix=f"finetune train {target / 'config.resolved.yaml'} --resume",
            )
        return target / "final"
    return target


def base_of(target: Path) -> str | None:
    """Returns what ``model.name_or_path`` said in the run that ``target`` (or its parent) is, or None."""
    for folder in (target, target.parent):
        record = folder / "run.json"
        if record.is_file():
            return str(json.loads(record.read_text(encoding="utf-8"))["model"]["name_or_path"])
    return None


def load_tuned(
    target: str | Path, *, base: str | None = None, task: str | None = None, **options: Any
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Returns the model and tokenizer of a run directory, its ``final``, an adapter folder, or a plain model.

    Args:
        target: Run directory, learned state, model folder, hub id or bundled model.
        base: The base model, where the target's own record of it is wrong or absent.
        task: Which task rows have that name none, where what was learned tells tasks apart.
        **options: As for :func:`finetune.models.load_model`.

    Raises:
        CheckpointError: The learned state is damaged or belongs to another base.
        ConfigError: The base cannot be loaded.
    """
    from finetune.api import load
    from finetune.models.load import load_model, load_tokenizer

    path = Path(target)
    folder = state_folder(path) if path.is_dir() else path
    learned = next((name for name in ("delta_config.json", "adapter_config.json") if (folder / name).is_file()), None)
    if learned is None:
        if task is not None:
            raise CapabilityError("a plain model does not tell tasks apart", where="task", got=task)
        return load_model(str(target), **options), load_tokenizer(str(target))
    recorded = json.loads((folder / learned).read_text(encoding="utf-8"))
    base = base or base_of(path) or recorded.get("base_model") or recorded.get("base_model_name_or_path")
    if not base:
        raise CheckpointError("the learned state does not say what its base is", where=str(folder), fix="--base MODEL")
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return load(base, folder, task=task, **options), load_tokenizer(str(folder) if has_tokenizer else base)
