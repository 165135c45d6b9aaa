"""Tiny models and a tokenizer as fixtures; each test gets its own, so it may change it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# Tiny tensors gain nothing from threads, and test workers share the cores. Read by OpenMP when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def tiny_llama() -> PreTrainedModel:
    from support.tiny import tiny_llama

    return tiny_llama()


@pytest.fixture
def tiny_llama_untied() -> PreTrainedModel:
    from support.tiny import tiny_llama

    return tiny_llama(tied=False)


@pytest.fixture
def tiny_gpt2() -> PreTrainedModel:
    from support.tiny import tiny_gpt2

    return tiny_gpt2()


@pytest.fixture
def tiny_qwen() -> PreTrainedModel:
    from support.tiny import tiny_qwen

    return tiny_qwen()


@pytest.fixture
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    from support.tiny import tiny_tokenizer

    return tiny_tokenizer()
