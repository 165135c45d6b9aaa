"""Exports what a run learned in a form that was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from finetune.core.errors import CapabilityError, ConfigError, list_choices, nearest
from finetune.core.files import require_empty
from finetune.export.merge import merge_run

__all__ = ["export_run"]


def export_run(run: Path, out: Path, to: str, *, task: str | None = None) -> Path:
    """Writes what ``run`` learned to ``out`` and returns ``out``.

    Args:
        run: Run directory, its ``final``, or an adapter folder.
        out: Folder that does not exist or is empty.
        to: ``peft`` (an adapter that stock PEFT loads, where the update is one), ``merged`` or ``safetensors`` (the
            dense weights of the tuned model as a Hugging Face folder, in the base's dtype), ``zo-log`` (a zeroth-order
            run as its seeds and numbers, which ``finetune.load`` replays).
        task: Which of the tasks is exported, where what was learned tells them apart.

    Raises:
        ConfigError: The form is unknown.
        RefusedError: ``out`` holds something.
        CapabilityError: What was learned has no such form.
        CheckpointError: The learned state is damaged or belongs to another base.
    """
    if to not in _FORMS:
        raise ConfigError(f"unknown form {to!r}", where="--to", want=list_choices(_FORMS), near=nearest(to, _FORMS))
    require_empty(out)
    _FORMS[to](run, out, task)
    return out


def _export_adapter(run: Path, out: Path, task: str | None) -> None:
    """Copies an adapter of stock PEFT, or expresses what was learned as one: LoRA, or SHiRA of entries."""
    import shutil

    from finetune.core.files import replaced_folder
    from finetune.core.learned_state import DELTA_CONFIG
    from finetune.methods.adapters.peft_catalogue import read_peft_tuners
    from finetune.methods.primitives.peft_files import ADAPTER_CONFIG, ADAPTER_TENSORS, read_adapter
    from finetune.models.tuned import state_folder

    folder = state_folder(run)
    if (folder / ADAPTER_CONFIG).is_file():
        read_adapter(folder)
        tuner = str(json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["peft_type"]).lower()
        if tuner not in read_peft_tuners():
            _export_low_rank(run, out, task)
            return
        if task is not None:
            raise CapabilityError("the adapter does not tell tasks apart", where="--task", got=task)
        with replaced_folder(out) as beside:
            for name in (ADAPTER_TENSORS, ADAPTER_CONFIG):
                shutil.copyfile(folder / name, beside / name)
    elif (folder / DELTA_CONFIG).is_file():
        _export_delta(run, folder, out)
    else:
        raise CapabilityError("a plain model has no adapter", where=str(run), want="the folder that a run saved")


def _export_low_rank(run: Path, out: Path, task: str | None) -> None:
    """Writes what a tuner of ours adds as a stock LoRA adapter."""
    from finetune.methods.primitives.lora_export import low_rank_layers, write_lora
    from finetune.models.tuned import base_of, load_tuned

    model, _ = load_tuned(run, task=task, dtype="float32")
    config = cast(Any, model).active_peft_config
    base = base_of(run) or str(config.base_model_name_or_path or "")
    write_lora(out, low_rank_layers(model), config.alpha, base_model=base)


def _export_delta(run: Path, folder: Path, out: Path) -> None:
    from finetune.core.learned_state import LEFT, read_learned_state
    from finetune.methods.primitives.stock_adapter import changes_of, write_stock_adapter
    from finetune.models import load_model
    from finetune.models.tuned import base_of, load_tuned

    tensors, recorded = read_learned_state(folder)
    if any(key.endswith(LEFT) for key in tensors):
        attached, _ = load_tuned(run)
        attached.__dict__["_methods"][-1].export_adapter(out)
        return
    base = base_of(run) or recorded["base_model"]
    changes = changes_of(tensors, recorded.get("axes", {}))
    # Only the kinds and sizes of the base's layers are needed.
    write_stock_adapter(out, changes, load_model(base, meta=True), base_model=base)


def _export_merged(run: Path, out: Path, task: str | None) -> None:
    merge_run(run, out, task=task)


def _export_log(run: Path, out: Path, task: str | None) -> None:
    from finetune.export.log import export_log

    if task is not None:
        raise CapabilityError("a log does not tell tasks apart", where="--task", got=task)
    export_log(run, out)


_FORMS: dict[str, Callable[[Path, Path, str | None], None]] = {
    "peft": _export_adapter,
    "merged": _export_merged,
    "safetensors": _export_merged,
    "zo-log": _export_log,
}
