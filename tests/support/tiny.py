"""Tiny random models and a tokenizer, made in code: the same for the same arguments, no downloads."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

__all__ = [
    "VOCABULARY",
    "save_tiny_model",
    "tiny_gemma2",
    "tiny_gpt2",
    "tiny_llama",
    "tiny_mixtral",
    "tiny_phi3",
    "tiny_qwen",
    "tiny_tokenizer",
    "token_batch",
]

VOCABULARY = 320
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_END_OF_TURN = _SPECIAL.index("<|im_end|>")
# Wide enough that two prompts get two answers; at the usual 0.02 every tiny model repeats its last token.
_SPREAD = 0.15
_TOKENS = {"bos_token_id": 1, "eos_token_id": _END_OF_TURN, "pad_token_id": _END_OF_TURN}
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "every day at noon the quick brown fox jumps over the lazy dog",
    "0 12 * * * /usr/bin/backup",
    "user assistant system",
    "What is the capital of France? Paris.",
)


def tiny_llama(
    tied: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0, layers: int = 2, **options: Any
) -> PreTrainedModel:
    """Returns a Llama of width 32 with grouped-query attention: 4 query heads, 2 key-value heads."""
    config = _config(LlamaConfig, num_hidden_layers=layers, tie_word_embeddings=tied, **options)
    return _build(LlamaForCausalLM, config, dtype, seed)


def tiny_gpt2(dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Returns a GPT-2 of width 32: ``Conv1D`` layers (``attn.c_proj`` square), biases everywhere, no dropout."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=_SPREAD,
        **_TOKENS,
    )
    return _build(GPT2LMHeadModel, config, dtype, seed)


def tiny_qwen(tied: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Returns a Qwen2 of width 32: biases in the query, key and value projections only, which are not zero."""
    return _build(Qwen2ForCausalLM, _config(Qwen2Config, tie_word_embeddings=tied), dtype, seed)


def tiny_phi3(dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Returns a Phi-3 of width 32: fused ``qkv_proj`` and ``gate_up_proj``."""
    return _build(Phi3ForCausalLM, _config(Phi3Config), dtype, seed)


def tiny_mixtral(dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Returns a Mixtral of width 32: three experts as 3-D parameters, two of them per token."""
    config = _config(MixtralConfig, num_local_experts=3, num_experts_per_tok=2)
    return _build(MixtralForCausalLM, config, dtype, seed)


def tiny_gemma2(dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Returns a Gemma 2 of width 32 that soft-caps its logits."""
    config = _config(Gemma2Config, head_dim=8, final_logit_softcapping=0.5)
    return _build(Gemma2ForCausalLM, config, dtype, seed)


def _config(kind: Any, **options: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rest = {"max_position_embeddings": 512, "tie_word_embeddings": True, "initializer_range": _SPREAD}
    return kind(vocab_size=VOCABULARY, **{**sizes, **heads, **rest, **_TOKENS, **options})


def _build(kind: Any, config: Any, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.normal_(0.0, _SPREAD)
    built: PreTrainedModel = model.to(dtype).eval()
    return built


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with a ChatML template; its pad token is its end-of-turn token."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer()),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=list(_SPECIAL),
        chat_template=_CHATML,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def _trained_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return str(tokenizer.to_str())


def save_tiny_model(folder: Path, **options: Any) -> Path:
    """Saves a tiny Llama with its tokenizer as a plain Hugging Face folder, and returns the folder.

    Args:
        folder: Made if absent.
        **options: As for :func:`tiny_llama`.
    """
    tiny_llama(**options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def token_batch(rows: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Returns random token ids, int64 (rows, length), none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(_SPECIAL), VOCABULARY, (rows, length), generator=generator)
