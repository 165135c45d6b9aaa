"""Greedy generation: batches with left padding write what single prompts write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.core.errors import DataError
from finetune.models.generate import generate, stop_ids


def _prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 15, (count,), generator=generator).tolist()
    return [torch.randint(5, 290, (length,), generator=generator).tolist() for length in lengths]


def _naive(model: Any, tokenizer: Any, prompt: list[int], limit: int) -> str:
    """Writes one token at a time from the whole sequence, without cache or padding."""
    stops, ids = stop_ids(model, tokenizer), list(prompt)
    for _ in range(limit):
        token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        if token in stops:
            break
        ids.append(token)
    return str(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True))


@pytest.mark.parametrize("model_name", ["tiny_llama", "tiny_gpt2"])
@torch.no_grad()
def test_any_batch_size_writes_what_the_naive_loop_writes(
    model_name: str, tiny_tokenizer: Any, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(model_name)
    prompts = _prompts(11)
    expected = [_naive(model, tiny_tokenizer, prompt, 12) for prompt in prompts]
    assert len(set(expected)) > 5
    for batch_size in (1, 4, 11):
        done: list[int] = []
        found = generate(model, tiny_tokenizer, prompts, max_new_tokens=12, batch_size=batch_size, progress=done.append)
        assert found == expected
        assert sum(done) == len(prompts)


@torch.no_grad()
def test_generation_stops_at_the_end_of_turn(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    """An answer ends at the first stop token, in a batch whose other rows go on."""
    prompts = _prompts(4)
    ids = generate_ids(tiny_llama, prompts[0], 6)
    tiny_llama.generation_config.eos_token_id = [ids[2]]
    found = generate(tiny_llama, tiny_tokenizer, prompts, max_new_tokens=6, batch_size=4)
    assert found[0] == tiny_tokenizer.decode(ids[: ids.index(ids[2])], skip_special_tokens=True)
    assert found == [_naive(tiny_llama, tiny_tokenizer, prompt, 6) for prompt in prompts]


def generate_ids(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_the_end_of_turn_of_the_template_stops_even_where_it_is_not_the_eos(
    tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    end_of_turn = tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")
    tiny_tokenizer.eos_token = "<|im_start|>"
    assert end_of_turn in stop_ids(tiny_llama, tiny_tokenizer)
    assert tiny_tokenizer.eos_token_id in stop_ids(tiny_llama, tiny_tokenizer)


@torch.no_grad()
def test_sampling_settings_of_the_model_do_not_matter_and_stay(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    prompts = _prompts(3)
    expected = generate(tiny_llama, tiny_tokenizer, prompts, max_new_tokens=8, batch_size=3)
    settings = tiny_llama.generation_config
    settings.do_sample, settings.temperature, settings.repetition_penalty = True, 5.0, 1.9
    tiny_llama.train()
    assert generate(tiny_llama, tiny_tokenizer, prompts, max_new_tokens=8, batch_size=3) == expected
    assert tiny_llama.generation_config is settings
    assert tiny_llama.training


@torch.no_grad()
def test_a_peft_model_generates_with_its_adapter(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(tiny_llama, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_alpha=64)).eval()
    prompts = _prompts(5)
    found = generate(tuned, tiny_tokenizer, prompts, max_new_tokens=8, batch_size=5)
    assert found == [_naive(tuned, tiny_tokenizer, prompt, 8) for prompt in prompts]


@pytest.mark.parametrize(("prompt", "what"), [([], "no token"), ([5] * 10_000, "longer than the model's context")])
def test_prompts_that_cannot_be_continued_are_errors(
    prompt: list[int], what: str, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    with pytest.raises(DataError, match=what):
        generate(tiny_llama, tiny_tokenizer, [prompt], max_new_tokens=4, batch_size=1)
