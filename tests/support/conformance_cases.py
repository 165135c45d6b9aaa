"""Which methods the suite runs, and how each is set up on a tiny model; a method that is registered later is in it."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny import tiny_llama, tiny_qwen
from transformers import PreTrainedModel

from finetune.methods import METHODS, Method, build_method, discover

__all__ = ["CASES", "CROPPED", "PENALISED", "base_model", "make"]

SETTINGS: dict[str, dict[str, Any]] = {
    "adalora": {"total_step": 40, "tinit": 2, "tfinal": 4, "init_r": 4, "target_r": 2},
    "adaption_prompt": {"adapter_len": 4},
    "boft": {"boft_block_size": 4, "target_modules": ["q_proj", "v_proj"]},
    "fourierft": {"n_frequency": 20},
    "lora": {"r": 4, "target_modules": "all-linear"},
    "oft": {"oft_block_size": 4},
    "randlora": {"r": 4},
    "s2ft": {"ratio": 0.2},
    "shira": {"r": 2},
    "trainable_tokens": {"token_indices": [5, 6, 7]},
    "vblora": {"vector_length": 4, "num_vectors": 16, "topk": 2, "r": 2},
    "vera": {"r": 8},
    "waveft": {"n_frequency": 20},
}
"""Fields for models of width 32, where the defaults are for real ones."""

REPRESENTATIVES = (
    "adalora",
    "bitfit",
    "dora",
    "full",
    "ia3",
    "ln_tuning",
    "loha",
    "lora",
    "oft",
    "prefix_tuning",
    "prompt_tuning",
    "randlora",
    "s2ft",
    "shira",
    "top_layers",
    "vera",
)
"""The default run; our own methods are all in it, of PEFT's tuners a dozen. All others are marked slow."""


CROPPED = {"adalora"}
"""Whose adapter leaves out ranks that were pruned to zero: the same update, summed over fewer terms."""

PENALISED = {"adalora"}
"""Whose loss has a term that PEFT adds once per forward pass, so that more micro-batches mean more of it."""


def _own(name: str) -> bool:
    return METHODS.get(name).family != "adapters"


def _cases() -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in REPRESENTATIVES or _own(name) else [pytest.mark.slow])
        for name in discover()
        if not getattr(METHODS.get(name), "unsuitable", "")
    ]


CASES = _cases()


def make(name: str, **overrides: Any) -> Method:
    """Returns the method with its settings for a tiny model."""
    return build_method({"name": name, **SETTINGS.get(name, {}), **overrides})


def base_model(name: str, **options: Any) -> PreTrainedModel:
    """Returns a tiny Llama, or for bitfit a Qwen2, which has biases."""
    return tiny_qwen(**options) if name == "bitfit" else tiny_llama(**options)
