"""Base and learned state as one plain Hugging Face model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from finetune.core.errors import CheckpointError, ConfigError, nearest
from finetune.core.files import replaced_folder, require_empty

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["MergeReport", "merge_run"]

_DTYPES = ("bfloat16", "float16", "float32")
_PROMPTS = (
    "The capital of France is",
    "Every day at noon",
    "def add(a, b):",
    "1, 2, 3, 4,",
    "Once upon a time there was",
    "Question: Why is the sky blue?\nAnswer:",
    "Dear Sir or Madam,",
    '{"name": "',
)


@dataclass(frozen=True)
class MergeReport:
    """What a merged model is, and how far rounding moved it.

    Attributes:
        folder: Where it is.
        dtype: Dtype of its weights.
        parameters: Number of scalars, a shared tensor counted once.
        bytes: Size of its weight files.
        tied: Whether the output head is the input embedding.
        max_logit_difference: Largest |difference| of a logit between the float32 tuned model and the saved one.
        mean_logit_difference: Mean of the same.
    """

    folder: str
    dtype: str
    parameters: int
    bytes: int
    tied: bool
    max_logit_difference: float
    mean_logit_difference: float

    def __str__(self) -> str:
        return (
            f"{self.folder}: {self.parameters:,} parameters in {self.dtype}, {self.bytes / 1e6:,.1f} MB"
            f"{', tied head' if self.tied else ''}\n"
            f"logits differ from the float32 tuned model by at most {self.max_logit_difference:.2g}, "
            f"{self.mean_logit_difference:.2g} on average, over {len(_PROMPTS)} prompts"
        )


def merge_run(run: Path, out: Path, dtype: str | None = None, *, task: str | None = None) -> MergeReport:
    """Writes the tuned model of ``run`` with its tokenizer, reads it back and compares it with what was trained.

    The sum of base and update is formed in float32 and rounded once.

    Args:
        run: Run directory, its ``final``, or an adapter folder.
        out: Folder that does not exist or is empty.
        dtype: ``float32``, ``bfloat16`` or ``float16``; None is that of the run, else of the base's config.
        task: Which of the tasks is merged, where what was learned tells them apart.

    Raises:
        RefusedError: ``out`` holds something.
        ConfigError: The dtype is unknown.
        CheckpointError: The learned state is damaged, or the saved model is not what was saved.
        CapabilityError: What was learned cannot be expressed as weights.
    """
    import torch

    from finetune.core.fingerprint import count_parameters, is_tied
    from finetune.models import load_model, load_tuned

    require_empty(out)
    if not run.is_dir():
        raise CheckpointError("there is no such run", where=str(run), want="a run directory or its final folder")
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}", want=", ".join(_DTYPES), near=nearest(dtype, _DTYPES))
    model, tokenizer = load_tuned(run, dtype="float32", task=task)
    prompts = [tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids for text in _PROMPTS]
    expected = _logits(model, prompts)
    plain = cast(Any, _merged(model))
    target = dtype or _recorded_dtype(run) or str(plain.config.dtype or "float32").removeprefix("torch.")
    tied = is_tied(plain)
    # Before the save, so that loading neither ties two heads that differ nor looks for one that is not stored.
    plain.config.tie_word_embeddings = tied
    plain.to(getattr(torch, target))
    with replaced_folder(out) as beside:
        plain.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        saved = load_model(str(beside), dtype=target, device=str(plain.device.type))
        if is_tied(saved) != tied or count_parameters(saved) != count_parameters(plain):
            raise CheckpointError("the saved model does not load as it was saved", where=str(out))
        differences = [(a - b).abs() for a, b in zip(expected, _logits(saved, prompts), strict=True)]
        size = sum(file.stat().st_size for file in beside.glob("*.safetensors"))
    every = torch.cat([difference.reshape(-1) for difference in differences])
    return MergeReport(
        folder=str(out),
        dtype=target,
        parameters=count_parameters(plain),
        bytes=size,
        tied=tied,
        max_logit_difference=float(every.max()),
        mean_logit_difference=float(every.mean()),
    )


def _merged(model: nn.Module) -> nn.Module:
    """Returns the plain model; an adapter and what was learned beside weights are still to be merged."""
    from peft import PeftModel

    from finetune.methods.primitives.peft_files import merge_adapter

    for method in reversed(model.__dict__.get("_methods", ())):
        if method.attached:
            model = method.merge()
    return merge_adapter(model, {}) if isinstance(model, PeftModel) else model


def _recorded_dtype(run: Path) -> str | None:
    """Returns the dtype that the run's record gives for its base model."""
    for folder in (run, run.parent):
        record = folder / "run.json"
        if record.is_file():
            dtype = json.loads(record.read_text(encoding="utf-8")).get("model", {}).get("dtype")
            return str(dtype) if dtype in _DTYPES else None
    return None


def _logits(model: Any, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    import torch

    vocabulary = model.get_input_embeddings().weight.shape[0]
    with torch.no_grad():
        return [model(input_ids=ids.clamp(max=vocabulary - 1).to(model.device)).logits.float().cpu() for ids in prompts]
