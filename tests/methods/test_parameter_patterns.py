"""The language of parameter patterns: what each form means, and what is said of one that means nothing."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from finetune.core.errors import ConfigError, TargetError
from finetune.methods.primitives.parameter_patterns import layer_range, match_parameters, parameter_kinds
from support.tiny import tiny_gpt2, tiny_llama, tiny_mixtral, tiny_phi3, tiny_qwen


def matched(model: Any, *patterns: str) -> set[str]:
    names = [name for name, _ in model.named_parameters()]
    return {name for found in match_parameters(model, names, patterns, "method.train").values() for name in found}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("model.layers.1.mlp.up_proj", {"model.layers.1.mlp.up_proj.weight"}),
        ("model.layers.1.mlp.up_proj.weight", {"model.layers.1.mlp.up_proj.weight"}),
        ("**.layers.0.self_attn.[qk]_proj", {f"model.layers.0.self_attn.{x}_proj.weight" for x in "qk"}),
        ("model.layers.*.mlp.up_proj", {f"model.layers.{n}.mlp.up_proj.weight" for n in range(11)}),
        ("re:layers\\.10\\..*(up|down)", {f"model.layers.10.mlp.{x}_proj.weight" for x in ("up", "down")}),
        ("embed", {"model.embed_tokens.weight"}),
        ("head", {"model.embed_tokens.weight"}),
        ("lm_head", {"model.embed_tokens.weight"}),  # the tied tensor by its other name
    ],
)
def test_patterns_mean_what_they_say(pattern: str, expected: set[str]) -> None:
    assert matched(tiny_llama(layers=11), pattern) == expected


def test_layers_are_whole_components_and_ranges_hold_both_ends() -> None:
    model = tiny_llama(layers=11)
    assert {name.split(".")[2] for name in matched(model, "model.layers.1")} == {"1"}
    assert {name.split(".")[2] for name in matched(model, "layers:9-10")} == {"9", "10"}
    with pytest.raises(TargetError):
        matched(model, "model.*.up_proj")  # a star stays within its component


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        ("25%-50%", 30, range(8, 15)),
        ("25%-50%", 32, range(8, 16)),
        ("25%-50%", 40, range(10, 20)),
        ("25%-50%", 60, range(15, 30)),
        ("last 4", 30, range(26, 30)),
        ("first 2", 30, range(2)),
        ("7", 30, range(7, 8)),
        ("8-15", 32, range(8, 16)),
    ],
)
def test_ranges_of_layers(text: str, layers: int, expected: range) -> None:
    assert layer_range(text, layers, "method.layers") == expected


@pytest.mark.parametrize("text", ["8-30", "last 31", "9-8", "50%-50%"])
def test_ranges_outside_the_model_are_refused(text: str) -> None:
    with pytest.raises(TargetError, match="0 to 29"):
        layer_range(text, 30, "method.layers")


@pytest.mark.parametrize(
    ("build", "kinds"),
    [
        (tiny_llama, {"attn", "mlp", "norm", "embed", "head"}),
        (tiny_qwen, {"attn", "mlp", "norm", "embed", "head", "bias"}),
        (tiny_gpt2, {"attn", "mlp", "norm", "embed", "head", "bias"}),
        (tiny_phi3, {"attn", "mlp", "norm", "embed", "head"}),
        (tiny_mixtral, {"attn", "mlp", "norm", "embed", "head", "experts", "router"}),
    ],
)
def test_kinds_are_told_from_the_structure(build: Any, kinds: set[str]) -> None:
    model = build()
    found = parameter_kinds(model)
    assert set().union(*found.values()) == kinds
    for name, own in found.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Linear) and ".layers." in name:
            assert len(own & {"attn", "mlp"}) == 1, name
        assert ("norm" in own) == ("norm" in type(module).__name__.lower()), name
        assert ("bias" in own) == name.endswith("bias"), name


def test_what_means_nothing_is_said_with_what_would() -> None:
    model = tiny_llama()
    with pytest.raises(TargetError, match=r"q_porj.*matches no parameter") as caught:
        matched(model, "**.q_porj")
    assert caught.value.near == "q_proj"
    with pytest.raises(ConfigError, match="regular expression"):
        matched(model, "re:(")
    with pytest.raises(ConfigError, match="range of layers"):
        matched(model, "layers:top")
