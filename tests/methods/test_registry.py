"""Names, configs, composition, and methods from outside the package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import finetune
from finetune.core.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    FinetuneWarning,
    RegistryError,
    TargetError,
)
from finetune.core.learned_state import read_learned_state
from finetune.methods import METHODS, build_method, discover
from finetune.methods.primitives.weight_slice import WeightSlice
from finetune.models import load_model
from support.tiny import save_tiny_model, tiny_gpt2, tiny_llama, tiny_qwen, token_batch


def test_every_tuner_of_the_installed_peft_is_registered_by_its_name() -> None:
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    configs = {kind: config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items() if "peft." in config.__module__}
    names = {str(kind.value).lower() for kind in configs}
    assert names <= set(discover())
    assert len(names) >= 45
    assert {"full", "top_layers", "bitfit", "s2ft", "dora"} <= set(discover())


def test_every_method_says_what_it_is() -> None:
    for name in discover():
        method = METHODS.get(name)
        assert method.name == name
        assert method.family in ("adapters", "freezing", "selective", "sharded_lora", "zeroth_order")
        assert (method.__doc__ or "").strip()
        assert all(field.description for field in method.Config.model_fields.values()), name


def test_wrong_names_and_keys_are_answered_with_the_right_ones() -> None:
    with pytest.raises(RegistryError) as unknown:
        build_method({"name": "s2tf"})
    assert unknown.value.near == "s2ft"
    with pytest.raises(ConfigError) as key:
        build_method({"name": "s2ft", "ration": 0.1})
    assert key.value.near == "ratio"
    with pytest.raises(ConfigError) as kind:
        build_method({"name": "lora", "r": "eight"})
    assert kind.value.where == "method.r"
    with pytest.raises(ConfigError, match="empty"):
        build_method([])


def test_a_later_method_chooses_among_what_the_earlier_left() -> None:
    method = build_method([{"name": "top_layers", "count": 1}, {"name": "s2ft", "ratio": 0.2}])
    model = method.attach(tiny_llama(layers=3))
    sliced = [name for name, module in model.named_modules() if isinstance(module, WeightSlice)]
    assert sliced == ["model.layers.2.self_attn.o_proj", "model.layers.2.mlp.down_proj"]
    assert all(name.startswith("model.layers.2") for name in method.trained_parameters())
    adapted = build_method([{"name": "top_layers", "count": 1}, {"name": "lora", "target_modules": ["q_proj"]}])
    adapted.attach(tiny_llama(layers=3))
    assert {name.split(".layers.")[1][0] for name in adapted.trained_parameters()} == {"2"}


@pytest.mark.parametrize("names", [("lora", "s2ft"), ("lora", "vera"), ("s2ft", "top_layers"), ("s2ft", "lora")])
def test_orders_that_make_no_sense_are_refused_with_the_reason(names: tuple[str, str]) -> None:
    with pytest.raises(CapabilityError, match=f"{names[1]} cannot follow {names[0]}: "):
        build_method([{"name": name} for name in names])


def test_a_package_adds_a_method_by_an_entry_point(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(
        "from finetune.methods import register\n"
        "from finetune.methods.whole_tensors import WholeTensors\n"
        "@register('norms_only')\n"
        "class NormsOnly(WholeTensors):\n"
        "    '''Trains the norms.'''\n"
        "    def choose(self, model, candidates):\n"
        "        return [name for name in sorted(candidates) if 'norm' in name]\n"
    )
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[finetune.methods]\nnorms_only = outside\n")
    command = [sys.executable, "-m", "finetune", "ls", "methods", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(tmp_path)})
    assert "norms_only" in {row["name"] for row in json.loads(done.stdout)}


def test_targets_that_match_nothing_are_named_with_the_nearest() -> None:
    with pytest.raises(TargetError) as caught:
        finetune.method("lora", target_modules=["q_proj", "kproj"]).attach(tiny_llama())
    assert "'kproj'" in caught.value.what
    assert "q_proj" not in caught.value.what
    assert caught.value.near == "k_proj"
    assert "q_proj (2)" in caught.value.want


def test_top_layers_trains_just_the_layers_nearest_to_the_output() -> None:
    for count, layers in ((1, {"3"}), (0.5, {"2", "3"})):
        method = finetune.method("top_layers", count=count)
        method.attach(tiny_llama(layers=4))
        names = set(method.trained_parameters())
        assert {name.split(".")[2] for name in names if "layers" in name} == layers
        assert "model.norm.weight" in names
    with pytest.raises(TargetError) as caught:
        finetune.method("top_layers", count=5).attach(tiny_llama(layers=4))
    assert caught.value.want == "1 to 4, or a share in (0, 1)"
    tied = finetune.method("top_layers", count=1, head=True)
    with pytest.warns(FinetuneWarning, match="input embedding too"):
        tied.attach(tiny_llama())


def test_no_gradient_flows_below_the_lowest_trained_layer() -> None:
    model = finetune.method("top_layers", count=1).attach(tiny_llama(layers=3))
    reached = []
    for number, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.register_full_backward_hook(lambda *_, number=number: reached.append(number))
    ids = token_batch()
    model(input_ids=ids, labels=ids).loss.backward()
    assert reached == [2]


def test_bitfit_trains_biases_by_name_and_is_refused_with_a_pointer_where_there_are_none() -> None:
    model = tiny_gpt2()
    biases = {name for name, _ in model.named_parameters() if name.endswith(".bias")}
    method = finetune.method("bitfit")
    method.attach(model)
    assert set(method.trained_parameters()) == biases
    method = finetune.method("bitfit")
    method.attach(tiny_qwen())
    assert {name.rpartition(".")[2] for name in method.trained_parameters()} == {"bias"}
    with pytest.raises(TargetError) as caught:
        finetune.method("bitfit").attach(tiny_llama())
    assert "ln_tuning" in caught.value.fix
    assert "beft" in caught.value.fix


def test_whole_tensors_are_stored_once_where_they_are_tied(tmp_path: Path) -> None:
    method = finetune.method("full")
    method.attach(tiny_llama(tied=True))
    method.save(tmp_path)
    tensors, metadata = read_learned_state(tmp_path)
    assert metadata["tied"] is True
    assert not any("lm_head" in name for name in tensors)
    assert sum(tensor.numel() for tensor in tensors.values()) == method.summary().total


def test_an_adapter_with_a_renamed_tensor_does_not_load(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    method = finetune.method("lora", r=2, target_modules=["q_proj"])
    method.attach(tiny_llama())
    method.save(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name.replace("q_proj", "_orig_mod.q_proj")] = tensors.pop(name)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="does not fit"):
        method.load(tmp_path)
    with pytest.raises(CheckpointError):
        finetune.load(tiny_llama(), tmp_path)


def test_a_wrong_base_is_refused_at_load(tmp_path: Path) -> None:
    for name in ("lora", "full", "s2ft"):
        method = finetune.method(name)
        method.attach(tiny_llama(seed=0))
        method.save(tmp_path / name)
        with pytest.raises(CheckpointError, match="another base model"):
            finetune.load(tiny_llama(seed=1), tmp_path / name)


@pytest.mark.parametrize("name", ["lora", "full", "s2ft"])
def test_what_was_learned_in_float32_is_loaded_in_it_where_another_dtype_is_faster(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.models.load.best_dtype", lambda device: torch.bfloat16)
    base = save_tiny_model(tmp_path / "base")
    method = finetune.method(name)
    method.attach(load_model(str(base), dtype="float32"))
    with torch.no_grad():
        for parameter in method.trained_parameters().values():
            parameter += 0.01
    method.save(tmp_path / "learned")
    loaded = finetune.load(str(base), tmp_path / "learned")
    ids = torch.tensor([[5, 6, 7]])
    assert next(loaded.parameters()).dtype == torch.float32
    written = finetune.load(load_model(str(base), dtype="float32"), tmp_path / "learned")
    assert torch.equal(loaded(ids).logits, written(ids).logits)
    if name == "s2ft":
        with pytest.raises(CheckpointError, match="another dtype") as caught:
            finetune.load(str(base), tmp_path / "learned", dtype="bfloat16")
        assert "float32" in str(caught.value)


def test_a_method_is_attached_once_and_before_it_is_used() -> None:
    method = finetune.method("s2ft", ratio=0.2)
    with pytest.raises(finetune.core.errors.TrainingError, match="not attached"):
        method.trained_parameters()
    model = method.attach(tiny_llama())
    with pytest.raises(finetune.core.errors.TrainingError, match="attached already"):
        method.attach(model)
    assert all(isinstance(parameter, nn.Parameter) for parameter in method.trained_parameters().values())
    assert torch.is_tensor(next(iter(method.state_dict().values())))


@pytest.mark.parametrize("first", [{"name": "s2ft"}, {"name": "cofitune", "soft_mask": False}, {"name": "random"}])
def test_entries_cannot_be_chosen_among_what_another_in_place_method_trains(first: dict[str, object]) -> None:
    with pytest.raises(CapabilityError, match="id3 cannot follow"):
        build_method([first, {"name": "id3"}])
