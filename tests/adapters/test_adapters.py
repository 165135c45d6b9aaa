"""Learned states put on, taken off, exchanged, fused and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import finetune
from finetune import adapters
from finetune.core.errors import CapabilityError, CheckpointError, ConfigError, RefusedError
from finetune.core.learned_state import DELTA_TENSORS
from support.steps import adamw, take_steps
from support.tiny import tiny_gpt2, tiny_llama

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "slices": ("s2ft", {"o_ratio": 0.5, "down_ratio": 0.2, "up_ratio": 0.2}),
    "other slices": ("s2ft", {"o_ratio": 0.25, "down_ratio": 0.3, "seed": 5}),
    "entries": ("random", {"budget": 0.05}),
    "other entries": ("magnitude", {"budget": 0.05}),
}

PAIRS = [("slices", "entries"), ("entries", "other entries"), ("other slices", "slices")]


def learned(folder: Path, kind: str, build: Any = tiny_llama, **options: Any) -> Path:
    """Trains a little and returns the folder of what was learned."""
    name, settings = SETTINGS[kind]
    method = finetune.method(name, **settings)
    model = method.attach(build(**options))
    take_steps(model, adamw(method), range(3))
    method.save(folder / kind)
    return folder / kind


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(model: Any, expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("first", "second"), [("slices", "entries"), ("entries", "other entries"), ("other slices", "slices")]
)
def test_on_exchanged_and_off_gives_the_base_back_bit_for_bit(
    tmp_path: Path, build: Any, dtype: torch.dtype, first: str, second: str
) -> None:
    a, b = (learned(tmp_path, kind, build, dtype=dtype) for kind in (first, second))
    model = build(dtype=dtype)
    base = weights(model)
    adapters.apply(model, a)
    with_a = weights(model)
    assert not same(model, base)
    adapters.switch(model, a, b)
    expected = finetune.load(build(dtype=dtype), b)
    assert same(model, weights(expected))
    adapters.switch(model, b, a)
    assert same(model, with_a)
    adapters.unapply(model, a)
    assert same(model, base)


def test_a_state_of_a_float32_base_goes_on_and_off_its_bfloat16_form(tmp_path: Path) -> None:
    folder = learned(tmp_path, "slices", dtype=torch.bfloat16)
    model = tiny_llama(dtype=torch.bfloat16).float()
    base = weights(model)
    adapters.apply(model, folder)
    adapters.unapply(model, folder)
    assert same(model, base)


def test_errors_leave_the_model_as_it_was(tmp_path: Path) -> None:
    a, b = learned(tmp_path, "slices"), learned(tmp_path, "entries", seed=1)
    model = tiny_llama()
    base = weights(model)
    with pytest.raises(CheckpointError, match="base values"):
        adapters.apply(model, b)
    with pytest.raises(CheckpointError, match="tuned values"):
        adapters.unapply(model, a)
    assert same(model, base)
    adapters.apply(model, a)
    tuned = weights(model)
    with pytest.raises(CheckpointError, match="base values"):
        adapters.apply(model, a)
    with pytest.raises(CheckpointError, match="base values"):
        adapters.switch(model, a, b)
    with pytest.raises(CheckpointError, match="missing"):
        adapters.switch(model, a, tmp_path / "nothing")
    (tmp_path / "slices" / DELTA_TENSORS).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="damaged"):
        adapters.unapply(model, a)
    assert same(model, tuned)


@pytest.mark.parametrize(
    ("method", "options"), [("top_layers", {"count": 1}), ("s2ft", {"form": "delta", "ratio": 0.2})]
)
def test_states_without_base_values_are_refused(tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    own = finetune.method(method, **options)
    own.attach(tiny_llama())
    own.save(tmp_path)
    with pytest.raises(CapabilityError, match="did not keep what the base holds"):
        adapters.apply(tiny_llama(), tmp_path)


def dense_change(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the change of every weight, in float64, from the models themselves."""
    base, tuned = tiny_llama().double(), finetune.load(tiny_llama(), folder).double()
    return {name: tuned.get_parameter(name).detach() - p.detach() for name, p in base.named_parameters()}


@pytest.mark.parametrize(
    ("first", "second"), [("slices", "other slices"), ("entries", "other entries"), ("slices", "entries")]
)
@pytest.mark.parametrize("factors", [(0.5, 0.5), (1.0, -2.0)])
def test_fusing_adds_weighted_changes(tmp_path: Path, first: str, second: str, factors: tuple[float, float]) -> None:
    a, b = learned(tmp_path, first), learned(tmp_path, second)
    out = adapters.fuse([(a, factors[0]), (b, factors[1])], tmp_path / "out")
    changes = [dense_change(folder) for folder in (a, b, out)]
    for name, change in changes[2].items():
        expected = factors[0] * changes[0][name] + factors[1] * changes[1][name]
        torch.testing.assert_close(change, expected, atol=2e-7, rtol=1e-5)
    model = tiny_llama()
    base = weights(model)
    adapters.apply(model, out)
    adapters.unapply(model, out)
    assert same(model, base)


def test_disjoint_adapters_fuse_exactly(tmp_path: Path) -> None:
    a = learned(tmp_path, "slices")
    name, settings = SETTINGS["slices"]
    SETTINGS["disjoint"] = (name, {**settings, "exclude_adapters": [str(a)]})
    b = learned(tmp_path, "disjoint")
    both = finetune.load(tiny_llama(), adapters.fuse([(a, 1.0), (b, 1.0)], tmp_path / "out"))
    one_after_the_other = tiny_llama()
    adapters.apply(one_after_the_other, a)
    adapters.apply(one_after_the_other, b)
    assert same(both, weights(one_after_the_other))


def test_what_cannot_be_fused_is_refused(tmp_path: Path) -> None:
    a, b = learned(tmp_path, "slices"), learned(tmp_path, "entries", seed=1)
    with pytest.raises(CheckpointError, match="different base models"):
        adapters.fuse([(a, 1.0), (b, 1.0)], tmp_path / "out")
    with pytest.raises(ConfigError, match="at least two"):
        adapters.fuse([(a, 1.0)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_error_in_a_later_tensor_leaves_a_loaded_model_as_it_was(tmp_path: Path) -> None:
    folder = learned(tmp_path, "entries")
    tensors = load_file(folder / DELTA_TENSORS)
    last = max(key for key in tensors if key.endswith(".base"))
    tensors[last] = tensors[last] + 1
    save_file(tensors, folder / DELTA_TENSORS)
    model = tiny_llama()
    base = weights(model)
    with pytest.raises(CheckpointError, match="another base model"):
        finetune.load(model, folder)
    assert same(model, base)


def test_positions_outside_a_tensor_are_damage(tmp_path: Path) -> None:
    folder = learned(tmp_path, "entries")
    tensors = load_file(folder / DELTA_TENSORS)
    key = next(key for key in tensors if key.endswith(".index"))
    tensors[key][-1] = 10**6
    save_file(tensors, folder / DELTA_TENSORS)
    with pytest.raises(CheckpointError, match="damaged"):
        adapters.apply(tiny_llama(), folder)
    with pytest.raises(CheckpointError, match="outside"):
        finetune.load(tiny_llama(), folder)


def test_a_state_trained_in_bfloat16_merges_into_its_base_stored_in_float32(tmp_path: Path) -> None:
    folder = learned(tmp_path, "slices", dtype=torch.bfloat16)
    # float32 weights that bfloat16 rounds to those that were trained on.
    loaded = finetune.load(tiny_llama(), folder)
    trained = finetune.load(tiny_llama(dtype=torch.bfloat16), folder)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.bfloat16(), trained.get_parameter(name)), name


def test_fusing_onto_a_source_or_something_else_is_refused(tmp_path: Path) -> None:
    a, b = learned(tmp_path, "slices"), learned(tmp_path, "entries")
    before = (a / DELTA_TENSORS).read_bytes()
    with pytest.raises(RefusedError, match="is there already"):
        adapters.fuse([(a, 1.0), (b, 1.0)], a)
    assert (a / DELTA_TENSORS).read_bytes() == before
    with pytest.raises(ConfigError, match="not finite"):
        adapters.fuse([(a, float("nan")), (b, 1.0)], tmp_path / "out")


def test_an_adapter_of_peft_is_sent_to_peft(tmp_path: Path) -> None:
    method = finetune.method("lora", target_modules="all-linear", r=2)
    method.attach(tiny_llama())
    method.save(tmp_path)
    with pytest.raises(CapabilityError, match="adapter of PEFT") as caught:
        adapters.apply(tiny_llama(), tmp_path)
    assert "finetune merge" in caught.value.fix


def test_differences_are_counted_by_entries(tmp_path: Path) -> None:
    a, b = learned(tmp_path, "slices"), learned(tmp_path, "entries")
    result = adapters.diff(a, b)
    first, second = (load_file(folder / DELTA_TENSORS) for folder in (a, b))
    masks: list[dict[str, torch.Tensor]] = []
    model = tiny_llama()
    for tensors, axes in ((first, json.loads((a / "delta_config.json").read_text())["axes"]), (second, None)):
        own = {}
        for name, parameter in model.named_parameters():
            mask = torch.zeros(parameter.shape, dtype=torch.bool)
            if f"{name}.index" in tensors:
                if axes is None:
                    mask.view(-1)[tensors[f"{name}.index"].long()] = True
                else:
                    mask.index_fill_(axes[name], tensors[f"{name}.index"].long(), True)
            own[name] = mask
        masks.append(own)
    both = sum(int((masks[0][name] & masks[1][name]).sum()) for name in masks[0])
    assert result.total.both == both > 0
    assert result.total.only_first == sum(int(m.sum()) for m in masks[0].values()) - both
    assert result.total.only_second == sum(int(m.sum()) for m in masks[1].values()) - both
    changes = [dense_change(folder) for folder in (a, b)]
    gaps = torch.cat([(changes[0][n] - changes[1][n])[masks[0][n] & masks[1][n]].abs() for n in changes[0]])
    assert result.total.largest == pytest.approx(float(gaps.max()), rel=1e-5)
    assert result.total.mean == pytest.approx(float(gaps.mean()), rel=1e-5)
    norm = torch.cat([change.reshape(-1) for change in changes[0].values()]).norm()
    assert result.total.first_norm == pytest.approx(float(norm), rel=1e-5)
    assert adapters.diff(a, a).total.largest == 0


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = learned(tmp_path, "entries")
    with pytest.raises(CheckpointError, match="base values"):
        adapters.apply(tiny_llama(intermediate_size=64), folder)
    tensors = load_file(folder / DELTA_TENSORS)
    del tensors[next(key for key in tensors if key.endswith(".base"))]
    save_file(tensors, folder / DELTA_TENSORS)
    with pytest.raises(CheckpointError, match="incomplete"):
        adapters.apply(tiny_llama(), folder)
