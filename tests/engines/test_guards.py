"""What accelerate does in silence, and what cannot be, is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import finetune
from finetune.config.schema import EngineSection
from finetune.core.errors import CapabilityError, ConfigError, TrainingError
from finetune.engines.choose import choose_engine, resolve_strategy
from finetune.engines.engine import Engine
from finetune.engines.sharded import Sharded
from finetune.methods import build_method
from support.tiny import tiny_llama


def resolved(strategy: str, processes: int, *, weights: int = 1, room: int = 10) -> str:
    return resolve_strategy(EngineSection(strategy=strategy), processes, weights=weights, room=room)


def test_what_auto_comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved("auto", 1, weights=100) == "single"
    assert resolved("auto", 4, weights=8) == "ddp"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert resolved("auto", 4, weights=9) == "fsdp"
    assert resolved("auto", 8, weights=9) == "hsdp"
    assert resolved("hsdp", 8) == "hsdp"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "deepspeed"])
def test_one_process_is_not_several(strategy: str) -> None:
    # As `accelerate launch --cpu --num_processes 2` starts it, without a word.
    with pytest.raises(ConfigError, match="there is one"):
        resolved(strategy, 1)


def test_several_processes_are_not_one() -> None:
    with pytest.raises(ConfigError, match="each on its own"):
        resolved("single", 2)


@pytest.mark.parametrize(("processes", "size"), [(4, 3), (4, 4), (6, 4)])
def test_groups_must_divide_the_processes(processes: int, size: int) -> None:
    with pytest.raises(ConfigError, match=r"shard_size"):
        choose_engine("hsdp", EngineSection(shard_size=size), processes, finetune.method("lora"))


def test_int8_is_for_weights_that_never_change() -> None:
    section = EngineSection(gather_dtype="int8")
    for name in ("full", "s2ft", "id3"):
        with pytest.raises(CapabilityError, match="none of them ever changes"):
            choose_engine("fsdp", section, 2, finetune.method(name))
    with pytest.raises(CapabilityError, match="none of them ever changes"):
        choose_engine("ddp", section, 2, finetune.method("lora"))
    assert isinstance(choose_engine("fsdp", section, 2, finetune.method("lora")), Sharded)


def test_what_needs_whole_weights_is_refused_before_they_load() -> None:
    with pytest.raises(CapabilityError, match=r"engine.strategy: ddp"):
        choose_engine("fsdp", EngineSection(), 2, finetune.method("shadow"))
    with pytest.raises(CapabilityError, match="what an earlier method added or chose"):
        choose_engine("fsdp", EngineSection(), 2, build_method([{"name": "lora"}, {"name": "mezo"}]))
    choose_engine("fsdp", EngineSection(), 2, build_method([{"name": "spectrum"}, {"name": "mezo"}]))


def test_a_trainer_of_fewer_processes_than_were_started_is_noticed(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(nn.Linear(2, 2), arguments)
    Engine(1).verify(trainer)
    with pytest.raises(TrainingError, match="do not train together"):
        Engine(2).verify(trainer)


def test_a_model_that_stayed_whole_is_noticed(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    method = finetune.method("lora")
    model = method.attach(tiny_llama())
    trainer = Trainer(model, arguments)
    engine = Sharded(1, shard_size=1)
    engine._model, engine._method = model, method
    with pytest.raises(TrainingError, match="0 sharded tensors"):
        engine.verify(trainer)


def test_gradients_of_none_stay_none_and_the_rest_is_the_mean() -> None:
    from finetune.engines.reducer import GradientReducer

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        layer = nn.Linear(3, 3)
        layer.bias.requires_grad_(True)
        reducer = GradientReducer(layer.parameters)
        reducer.begin()
        (layer.weight @ torch.ones(3)).sum().backward()
        reducer.finish()
        assert layer.bias.grad is None
        torch.testing.assert_close(layer.weight.grad, torch.ones(3, 3))
        assert reducer.bytes == 4 * (9 + 3 + 2)
    finally:
        torch.distributed.destroy_process_group()
