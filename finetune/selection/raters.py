"""The models that score, as a recipe says how to load them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from finetune.data_selection.engine.rater import Rater
from finetune.models import load_model, load_tokenizer
from finetune.models.dtype import resolve_device

if TYPE_CHECKING:
    import torch

    from finetune.config.schema import Recipe

__all__ = ["load_rater"]


def load_rater(recipe: Recipe, name: str, dtype: str) -> Rater:
    """Loads a model; what the recipe says of revision and template holds for its own model only.

    Args:
        recipe: The recipe.
        name: As ``model.name_or_path``.
        dtype: Of the weights.
    """
    section = recipe.model
    own = name == section.name_or_path
    model = load_model(
        name,
        dtype=dtype,
        attn_implementation="sdpa" if section.attn_implementation == "auto" else section.attn_implementation,
        device=str(_device(section.device)),
        revision=section.revision if own else None,
        trust_remote_code=section.trust_remote_code,
    )
    template = recipe.data.chat_template if own else None
    revision = section.revision if own else None
    tokenizer = load_tokenizer(
        name, revision=revision, trust_remote_code=section.trust_remote_code, chat_template=template
    )
    return Rater(model, tokenizer, name)


def _device(name: str) -> torch.device:
    """Returns the device of this process: of several on one machine each has an accelerator of its own."""
    import torch

    device = resolve_device(name)
    local = os.environ.get("LOCAL_RANK")
    return device if local is None or device.type != "cuda" else torch.device("cuda", int(local))
