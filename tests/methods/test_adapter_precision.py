"""Adapters over a 16-bit base: what the optimizer holds, what is computed in, what that keeps until the backward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import finetune
from support.tiny import tiny_llama, token_batch

ROWS = token_batch(2, 16)
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}


def adapted(**settings: Any) -> Any:
    return finetune.method("lora", **LORA, **settings).attach(tiny_llama(dtype=torch.bfloat16))


def stock(*, wide: bool) -> Any:
    config = LoraConfig(task_type="CAUSAL_LM", **LORA)
    return get_peft_model(tiny_llama(dtype=torch.bfloat16), config, autocast_adapter_dtype=wide)


def same_values(model: Any, *others: Any) -> None:
    """Fills the adapters of all models with the same numbers."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
                for other in others:
                    other.get_parameter(name).copy_(parameter)


def kept_bytes(model: Any) -> int:
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ROWS, labels=ROWS).loss.backward()
    return sum(kept.values())


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ROWS).logits
    return found


def test_float32_parameters_compute_as_their_16_bit_copies_would() -> None:
    ours, narrow = adapted(), stock(wide=False)
    same_values(ours, narrow)
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32}
    assert torch.equal(logits(ours), logits(narrow))
    for model in (ours, narrow):
        model.train()(input_ids=ROWS, labels=ROWS).loss.backward()
    for name, parameter in narrow.named_parameters():
        if parameter.requires_grad:
            gradient = ours.get_parameter(name).grad
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, parameter.grad.float()), name


def test_less_is_kept_for_the_backward_pass_than_by_stock_peft() -> None:
    wide, narrow = kept_bytes(stock(wide=True).train()), kept_bytes(stock(wide=False).train())
    ours = kept_bytes(adapted().train())
    assert wide > 1.2 * narrow
    # The cast copies of the parameters are all that comes on top.
    copies = sum(2 * p.numel() for p in adapted().parameters() if p.requires_grad)
    assert ours <= narrow + copies


def test_both_of_stock_pefts_ways_are_there() -> None:
    wide = stock(wide=True)
    ours = adapted(compute_dtype="trainable")
    same_values(ours, wide)
    assert torch.equal(logits(ours), logits(wide))
    assert {p.dtype for p in adapted(trainable_dtype="base").parameters() if p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("compute", ["base", "trainable"])
def test_what_is_loaded_computes_as_what_was_saved(compute: str, tmp_path: Path) -> None:
    method = finetune.method("lora", **LORA, compute_dtype=compute)
    model = method.attach(tiny_llama(dtype=torch.bfloat16))
    same_values(model)
    method.save(tmp_path)
    expected = logits(model)
    assert torch.equal(logits(finetune.load(tiny_llama(dtype=torch.bfloat16), tmp_path)), expected)
    plain = logits(PeftModel.from_pretrained(tiny_llama(dtype=torch.bfloat16), tmp_path))
    assert torch.equal(plain, expected) is (compute == "trainable")
    assert torch.allclose(plain, expected, atol=0.1)
    assert torch.allclose(logits(method.merge()), expected, atol=0.1)


def test_a_float32_base_is_untouched() -> None:
    method = finetune.method("lora", **LORA)
    model = method.attach(tiny_llama())
    config = LoraConfig(task_type="CAUSAL_LM", **LORA)
    same_values(model, reference := get_peft_model(tiny_llama(), config))
    assert torch.equal(logits(model), logits(reference))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_it_compiles_without_a_graph_break(method: str) -> None:
    settings = LORA if method == "lora" else {}
    model = finetune.method(method, **settings).attach(tiny_llama(dtype=torch.bfloat16))
    expected = model(input_ids=ROWS, labels=ROWS).loss.detach()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    loss = compiled(input_ids=ROWS, labels=ROWS).loss
    loss.backward()
    assert torch.equal(loss.detach(), expected)


def test_a_copy_computes_with_its_own_parameters() -> None:
    model = adapted()
    same_values(model)
    before = logits(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not logits(twin).any()
    assert torch.equal(logits(model), before)
