"""Blocks that stay on disk: all comes out as if they were in memory, and no more of them is there than agreed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import finetune
from finetune.core.errors import CapabilityError, ConfigError, FinetuneError
from finetune.methods import build_method
from finetune.offload import BlockStreamer, load_streamed
from finetune.offload.blocks import find_blocks
from support.tiny import (
    tiny_gemma2,
    tiny_gpt2,
    tiny_llama,
    tiny_mixtral,
    tiny_phi3,
    tiny_qwen,
    token_batch,
)
from support.workshop import write_workshop

LAYERS = 5
SOURCES: tuple[Literal["disk", "mmap"], ...] = ("disk", "mmap")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_llama(layers=LAYERS).save_pretrained(path)
    return path


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = token_batch(seed=seed)
    return {"input_ids": ids, "labels": ids}


def resident(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model


def lora_gradients(model: PreTrainedModel, passes: int = 3) -> list[torch.Tensor]:
    """Returns loss and gradients of LoRA with dropout, pass after pass."""
    torch.manual_seed(1)
    tuned: Any = get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2, init_lora_weights=False)
    )
    tuned.train()
    found = []
    for number in range(passes):
        torch.manual_seed(number)
        loss = tuned(**batch(seed=number)).loss
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in tuned.parameters() if p.grad is not None)]
        tuned.zero_grad()
    return found


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_qwen, tiny_phi3, tiny_gemma2])
@pytest.mark.parametrize("source", SOURCES)
def test_gradients_of_lora_are_those_of_the_resident_model_bit_for_bit(
    build: Callable[[], PreTrainedModel], source: Literal["disk", "mmap"], tmp_path: Path
) -> None:
    build().save_pretrained(tmp_path)
    expected_model = resident(tmp_path)
    expected = lora_gradients(expected_model)
    attention = expected_model.config._attn_implementation
    model, streamer = load_streamed(str(tmp_path), source=source, attn_implementation=attention)
    got = lora_gradients(model)
    streamer.remove()
    assert len(got) == len(expected) > 3
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("slots", [2, 3, LAYERS])
def test_a_step_reads_what_is_not_there_any_more_and_nothing_else(folder: Path, slots: int) -> None:
    """The backward pass begins with the blocks that the forward pass ended with, and the next step the other way round.

    So of L blocks and K slots a forward pass reads L - K after the first one, and a backward pass as many.
    """
    expected = lora_gradients(resident(folder))
    model, streamer = load_streamed(str(folder), slots=slots)
    got = lora_gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    reads = LAYERS + (LAYERS - slots) + 2 * 2 * (LAYERS - slots)
    assert streamer.traffic().bytes == reads * streamer.streamed_bytes / LAYERS


def test_only_the_slots_are_in_memory(folder: Path) -> None:
    model, streamer = load_streamed(str(folder))
    at_rest = {id(p): p.untyped_storage().data_ptr() for b in find_blocks(model).values() for p in b.parameters()}
    buffers: set[int] = set()
    bound: list[int] = []

    def look(*_: Any) -> None:
        places = {id(p): p for b in find_blocks(model).values() for p in b.parameters()}
        moved = [p for key, p in places.items() if p.untyped_storage().data_ptr() != at_rest[key]]
        buffers.update(p.untyped_storage().data_ptr() for p in moved)
        bound.append(len(moved))

    for block in find_blocks(model).values():
        block.get_submodule("mlp").register_forward_hook(look)
    with torch.no_grad():
        for _ in range(2):
            model(**batch())
    in_a_block = len(list(next(iter(find_blocks(model).values())).parameters()))
    assert len(buffers) == streamer.slots == 2
    # The one that computes; what it computed before has gone back where the next one is read into its buffer.
    assert max(bound) <= 2 * in_a_block
    streamer.remove()
    assert all(p.untyped_storage().data_ptr() == at_rest[id(p)] for b in streamer._blocks for p in b.parameters())


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "section",
    [
        {"name": "lozo", "eps": 1e-2},
        [{"name": "lora", "r": 4}, {"name": "mezo"}],
        {"name": "lora", "r": 4},
        {"name": "mos", "r": 4, "equiv_rank": 2, "private_rank": 1, "num_shards": 2},
        {"name": "mosa", "r": 4, "n_experts": 2},
        {"name": "s2ft", "ratio": 0.2, "form": "delta"},
    ],
    ids=["lozo", "lora+mezo", "lora", "mos", "mosa", "s2ft"],
)
def test_what_methods_learn_beside_the_weights_is_that_of_the_resident_model(
    folder: Path, section: Any, source: Literal["disk", "mmap"]
) -> None:
    def learned(model: PreTrainedModel) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        method = build_method(section)
        tuned: Any = method.attach(model)
        tuned.train()
        optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-3, betas=(0.0, 0.99))
        for number in range(4):
            tuned(**batch(seed=number), use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return method.state_dict()

    expected = learned(resident(folder))
    model, _ = load_streamed(str(folder), source=source)
    got = learned(model)
    assert expected.keys() == got.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert any(tensor.any() for tensor in got.values())


@pytest.mark.parametrize("source", SOURCES)
def test_generation_uses_the_cache_and_says_the_same(folder: Path, source: Literal["disk", "mmap"]) -> None:
    ids = torch.tensor([[9, 20, 31, 42]])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = resident(folder).generate(ids, **options)  # type: ignore[operator]
    model, _ = load_streamed(str(folder), source=source)
    assert torch.equal(model.generate(ids, **options), expected)  # type: ignore[operator]


def test_sharded_files_and_16_bit(tmp_path: Path) -> None:
    tiny_llama(layers=3, tied=False, dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    expected = resident(tmp_path)(**batch()).logits
    model, _ = load_streamed(str(tmp_path))
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(model(**batch()).logits, expected)


def test_what_cannot_be_streamed_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    tiny_mixtral().save_pretrained(tmp_path / "moe")
    with pytest.raises(CapabilityError, match="other names for the weights"):
        load_streamed(str(tmp_path / "moe"))
    with pytest.raises(ConfigError, match="in the dtype that they are stored in") as error:
        load_streamed(str(folder), dtype="bfloat16")
    assert "model.dtype: float32" in str(error.value.problems[0])
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="the folder has none"):
        load_streamed(str(tmp_path / "none"))
    with pytest.raises(CapabilityError, match="what its blocks are"):
        find_blocks(torch.nn.Linear(2, 2))


def test_a_cache_in_a_pass_with_gradients_is_refused(folder: Path) -> None:
    model, _ = load_streamed(str(folder))
    tuned: Any = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(CapabilityError, match="twice"):
        tuned(**batch(), use_cache=True)


def test_a_file_that_ends_too_early_stops_the_pass(tmp_path: Path) -> None:
    tiny_llama(layers=3).save_pretrained(tmp_path)
    model, streamer = load_streamed(str(tmp_path))
    file = tmp_path / "model.safetensors"
    last = max(place.offset + place.size for place in streamer._files.places.values())
    with file.open("r+b") as stream:
        stream.truncate(last // 2)
    with pytest.raises(OSError, match="ends within"), torch.no_grad():
        model(**batch())


class TestRecipe:
    @pytest.fixture(scope="class")
    def workshop(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_workshop(
            tmp_path_factory.mktemp("workshop"),
            [{"prompt": f"say {i}", "completion": f"{i % 7}"} for i in range(24)],
            "method: {name: lora, r: 4}",
            "train: {per_device_train_batch_size: 4, learning_rate: 1e-3, max_steps: 6, save_steps: 3}",
        ).parent

    @pytest.mark.parametrize("source", SOURCES)
    def test_a_run_learns_the_same_and_says_what_it_read(self, workshop: Path, tmp_path: Path, source: str) -> None:
        recipe, weights = workshop / "recipe.yaml", workshop / "model" / "model.safetensors"
        before = hashlib.sha256(weights.read_bytes()).digest()
        finetune.train(recipe, f"output_dir={tmp_path / 'resident'}")
        streamed = [f"engine.offload.weights={source}", f"output_dir={tmp_path / 'streamed'}"]
        result = finetune.train(recipe, *streamed)
        names = [tmp_path / run / "final" / "adapter_model.safetensors" for run in ("resident", "streamed")]
        expected, got = map(load_file, names)
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert (result.record["streaming"]["bytes"] > 0) == (source == "disk")
        assert hashlib.sha256(weights.read_bytes()).digest() == before

    @pytest.mark.parametrize(
        ("overrides", "what"),
        [
            (["method={name: s2ft, ratio: 0.1}"], "only read"),
            (["method=mezo"], "only read"),
            (["train.activation_checkpointing=true"], "computed again"),
            (["engine.offload.slots=1"], "slots"),
            (["model.dtype=bfloat16"], "stored in"),
        ],
    )
    def test_what_does_not_go_together_is_refused(self, workshop: Path, overrides: list[str], what: str) -> None:
        with pytest.raises(FinetuneError, match=what):
            finetune.train(workshop / "recipe.yaml", "engine.offload.weights=disk", *overrides)
        assert not (workshop / "run").exists()


def test_a_streamer_goes_on_any_model_of_views(folder: Path) -> None:
    """The Python API: a model and its streamer; removed, the model computes from the files."""
    model, streamer = load_streamed(str(folder))
    assert isinstance(streamer, BlockStreamer)
    with torch.no_grad():
        streamed = model(**batch()).logits
        streamer.remove()
        assert torch.equal(model(**batch()).logits, streamed)
    assert model.config.use_cache
