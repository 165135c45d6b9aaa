"""Greedy generation in batches: left padding, KV cache, the same text for any batch size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from finetune.core.errors import DataError
from finetune.data.records import Conversation, Message
from finetune.data.render import render
from finetune.models.batches import by_length, padded, scoring

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

__all__ = ["check_context", "generate", "greedy_settings", "stop_ids"]


def generate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    progress: Callable[[int], object] | None = None,
) -> list[str]:
    """Returns what ``model`` greedily writes after each prompt, in order, without special tokens.

    Args:
        model: A causal LM, plain or wrapped by PEFT.
        tokenizer: Its tokenizer.
        prompts: Token ids, each with at least one.
        max_new_tokens: Tokens after which a text is cut off.
        batch_size: Prompts of one batch.
        progress: Called with the number of prompts that were just finished.

    Raises:
        DataError: A prompt is empty or, with the new tokens, longer than the model's context.
    """
    check_context(model, prompts, max_new_tokens)
    texts: list[str | None] = [None] * len(prompts)
    stops = stop_ids(model, tokenizer)
    order = by_length([len(prompt) for prompt in prompts])
    with scoring(model), greedy_settings(model, tokenizer, max_new_tokens):
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            written = _write_batch(model, tokenizer, [prompts[position] for position in batch])
            for position, ids in zip(batch, written, strict=True):
                end = next((at for at, token in enumerate(ids) if token in stops), len(ids))
                texts[position] = str(tokenizer.decode(ids[:end], skip_special_tokens=True))
            if progress is not None:
                progress(len(batch))
    done = [text for text in texts if text is not None]
    if len(done) != len(prompts):
        raise RuntimeError(f"wrote {len(done)} of {len(prompts)} texts")
    return done


def _write_batch(model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]]) -> list[list[int]]:
    import torch

    fill = _pad_id(tokenizer)
    ids, mask = padded(prompts, fill, "left", next(model.parameters()).device)
    mask = torch.ones_like(ids) if mask is None else mask
    written = model.generate(input_ids=ids, attention_mask=mask)
    rows: list[list[int]] = written[:, ids.shape[1] :].tolist()
    return rows


def check_context(model: Any, prompts: Sequence[list[int]], max_new_tokens: int) -> None:
    """Checks that every prompt has a token and leaves room for the answer.

    Raises:
        DataError: One does not.
    """
    limit = getattr(_base(model).config.get_text_config(), "max_position_embeddings", None)
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise DataError("a prompt has no token", where=f"prompt {number}")
        if limit is not None and len(prompt) + max_new_tokens > limit:
            raise DataError(
                "a prompt and its answer are longer than the model's context",
                where=f"prompt {number}",
                got=f"{len(prompt)} tokens and up to {max_new_tokens} new ones",
                want=f"at most {limit} tokens",
            )


def stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the ids that end an answer: the tokenizer's EOS, the model's, and what ends a turn in the chat template.

    The last is read off a rendered turn: it is the token that training puts last under the loss.
    """
    given = getattr(_base(model), "generation_config", None)
    ends = getattr(given, "eos_token_id", None)
    stops = set(ends) if isinstance(ends, (list, tuple)) else {ends}
    stops.add(tokenizer.eos_token_id)
    if tokenizer.chat_template is not None:
        turn = Conversation((Message("user", "a"), Message("assistant", "b")), id="", source="", line=None, extra={})
        labels = [label for label in render(turn, tokenizer, loss_on="assistant").labels if label != -100]
        stops |= set(labels[-1:]) & set(tokenizer.added_tokens_decoder)
    return {int(stop) for stop in stops if stop is not None}


@contextlib.contextmanager
def greedy_settings(model: Any, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> Iterator[None]:
    """Lets ``model.generate`` write greedily, whatever the model's own settings say, and gives those back.

    Many published models carry sampling settings or a repetition penalty, which ``generate`` would merge into any
    settings that it is given.
    """
    from transformers import GenerationConfig

    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stop_ids(model, tokenizer)) or None,
        pad_token_id=_pad_id(tokenizer),
    )
    owners = list({id(owner): owner for owner in (model, _base(model))}.values())
    previous = [owner.generation_config for owner in owners]
    try:
        for owner in owners:
            owner.generation_config = settings
        yield
    finally:
        for owner, own in zip(owners, previous, strict=True):
            owner.generation_config = own


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    # Padding is masked, so any id serves.
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
