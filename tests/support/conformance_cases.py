"""Which methods the suite runs, and how each is set up on a tiny model; a method that is registered later is in it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from transformers import PreTrainedModel

from finetune.methods import METHODS, Method, build_method, discover
from support.tiny import tiny_llama, tiny_qwen

__all__ = ["BATCH_DEPENDENT", "CASES", "CROPPED", "UNPICKLABLE", "base_model", "make"]

SETTINGS: dict[str, dict[str, Any]] = {
    "adalora": {"total_step": 40, "tinit": 2, "tfinal": 4, "init_r": 4, "target_r": 2},
    "adaption_prompt": {"adapter_len": 4},
    "boft": {"boft_block_size": 4, "target_modules": ["q_proj", "v_proj"]},
    "c3a": {"block_size": 4},
    "cofitune": {"layers": "0-1", "modules": ["q", "k", "v", "up", "down", "gate"]},
    "fourierft": {"n_frequency": 20},
    "freeze": {"train": ["layers:0", "model.layers.1.mlp.up_proj.weight[8:24]", "norm"], "freeze": ["**.k_proj"]},
    "id3": {"accumulation": "exact"},
    "lora": {"r": 4, "target_modules": "all-linear"},
    "lozo": {"directions": "shared"},
    "mhr": {"tasks": ["one"], "r": 2, "n_skills": 3, "n_splits": 2},
    "miss": {"r": 4},
    "mos": {"r": 3, "equiv_rank": 2, "private_rank": 1, "num_shards": 2},
    "mosa": {"r": 4, "n_experts": 2},
    "oft": {"oft_block_size": 4},
    "prolora": {"r": 4, "unshared_rank": 1, "num_shards": 2},
    "psoft": {"r": 4},
    "pure_sharing": {"equiv_rank": 1},
    "randlora": {"r": 4},
    "road": {"group_size": 4},
    "s2ft": {"ratio": 0.2},
    "shira": {"r": 2},
    # Above the noise of losses that a bfloat16 forward pass gives, which is not the same on every CPU.
    "sparse_mezo": {"eps": 1e-2},
    "spectrum": {"top_percent": 50},
    "trainable_tokens": {"token_indices": [5, 6, 7]},
    "vblora": {"vector_length": 4, "num_vectors": 16, "topk": 2, "r": 2},
    "vera": {"r": 8},
    "waveft": {"n_frequency": 20},
}
"""Fields for models of width 32, where the defaults are for real ones."""

CROPPED = {"adalora"}
"""Whose adapter leaves out ranks that were pruned to zero: the same update, summed over fewer terms."""

BATCH_DEPENDENT = {
    "adalora": "PEFT adds its penalty to the loss of every forward pass, so more micro-batches mean more of it",
    "fzoo": "it divides by the deviation of each batch's losses over its directions",
    "lily": "its router averages over the rows of a batch",
    "shadow": "PEFT adds the shadow's own loss to that of every forward pass",
}
"""Methods of PEFT whose gradient is not the sum over the rows, and why."""

UNPICKLABLE = {"osf": "PEFT hangs local functions on its parameters"}
MISSING = {"adamss": "sklearn"}
"""Packages that a tuner needs and this project does not."""


def _case(name: str) -> Any:
    package = MISSING.get(name)
    absent = package is not None and importlib.util.find_spec(package) is None
    return pytest.param(name, marks=[pytest.mark.skip(reason=f"{name} needs {package}")] if absent else [])


CASES = [_case(name) for name in discover() if not getattr(METHODS.get(name), "unsuitable", "")]


def make(name: str, **overrides: Any) -> Method:
    """Returns the method with its settings for a tiny model."""
    return build_method({"name": name, **SETTINGS.get(name, {}), **overrides})


def base_model(name: str, **options: Any) -> PreTrainedModel:
    """Returns a tiny Llama, or for bitfit a Qwen2, which has biases."""
    return tiny_qwen(**options) if name == "bitfit" else tiny_llama(**options)
