"""Patterns of what trains: whole parameters, rows of them, lists for other trainers."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.core.errors import CapabilityError, CheckpointError, ConfigError, FinetuneError, TargetError
from finetune.methods.primitives.unfrozen_list import match_unfrozen
from support.tiny import tiny_gpt2, tiny_llama, tiny_mixtral, token_batch

ROWS = token_batch(4, 12)
EMBEDDING = "model.embed_tokens.weight"


def attach(model: Any = None, **config: Any) -> tuple[Any, Any]:
    method = finetune.method("freeze", **config)
    return method, method.attach(tiny_llama() if model is None else model)


def train(method: Any, model: Any, steps: int = 20) -> None:
    optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        model(input_ids=ROWS, labels=ROWS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_what_freeze_names_is_taken_from_what_train_names() -> None:
    method, _ = attach(train=["layers:1"], freeze=["norm", "model.layers.1.mlp.up_proj"])
    expected = {f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkvo"}
    assert set(method.trained_parameters()) == expected | {
        f"model.layers.1.mlp.{p}_proj.weight" for p in ("gate", "down")
    }
    assert any(
        "layers:1: 9; not norm: 5; not model.layers.1.mlp.up_proj: 1" in line for line in method.summary().chosen
    )
    method, _ = attach(train=[f"{EMBEDDING}[3:5]", "attn"], freeze=["embed"])  # rows too
    assert not any("embed" in name for name in method.trained_parameters())
    method, _ = attach(freeze=["embed", "norm"])
    assert len(method.trained_parameters()) == 14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_rows_train_and_the_others_stay_bit_identical_under_weight_decay(build: Any, dtype: torch.dtype) -> None:
    base = build(dtype=dtype)
    name = EMBEDDING if build is tiny_llama else "transformer.wte.weight"
    method, model = attach(copy.deepcopy(base), train=[f"{name}[-20:]", f"{name}[10:12]"])
    assert method.summary().trained == 22 * 32
    train(method, model)
    before, after = (dict(m.named_parameters())[name].detach() for m in (base, method.merge()))
    changed = (before != after).any(1)
    assert changed.nonzero().flatten().tolist() == [10, 11, *range(300, 320)]


def test_rows_of_a_shared_weight_take_both_gradients_as_the_dense_one_does() -> None:
    method, model = attach(train=[f"{EMBEDDING}[5:9]"])
    model(input_ids=ROWS, labels=ROWS).loss.backward()
    (rows,) = method.trained_parameters().values()
    dense = tiny_llama()
    dense(input_ids=ROWS, labels=ROWS).loss.backward()
    assert torch.allclose(rows.grad, dense.get_parameter(EMBEDDING).grad[5:9], rtol=1e-5, atol=1e-8)


def test_whole_parameters_and_rows_are_saved_loaded_and_merged(tmp_path: Path) -> None:
    config = {"train": [f"{EMBEDDING}[:7]", "model.layers.0.mlp"]}
    base = tiny_llama()
    method, model = attach(copy.deepcopy(base), **config)
    train(method, model, 3)
    expected = model(input_ids=ROWS).logits
    method.save(tmp_path)
    assert torch.equal(finetune.load(copy.deepcopy(base), tmp_path)(input_ids=ROWS).logits, expected)
    again, fresh = attach(copy.deepcopy(base), **config)
    again.load(tmp_path)
    assert torch.equal(fresh(input_ids=ROWS).logits, expected)
    with pytest.raises(CheckpointError, match="config"):
        attach(copy.deepcopy(base), train=[f"{EMBEDDING}[:8]"])[0].load(tmp_path)
    other = tiny_llama(seed=1)
    with pytest.raises(CheckpointError):
        finetune.load(other, tmp_path)
    assert torch.equal(method.merge()(input_ids=ROWS).logits, expected)


class TestListsForOtherTrainers:
    def of(self, tmp_path: Path, *entries: str) -> str:
        path = tmp_path / "list.yaml"
        path.write_text("unfrozen_parameters:\n" + "".join(f"- {entry}\n" for entry in entries))
        return str(path)

    def test_entries_are_expressions_from_the_start_with_plain_dots_and_rows(self, tmp_path: Path) -> None:
        entries = (
            "^lm_head.weight$",
            "model.layers.1.mlp.up_proj # comment",
            "model.layers.[0-9]+.self_attn.q",
            "^model.norm.weight$[0:4]",
            "model.l.+1.input_layernorm",
        )
        method, _ = attach(unfrozen_parameters=self.of(tmp_path, *entries))
        assert set(method.trained_parameters()) == {
            EMBEDDING,  # the tied head
            "model.layers.1.mlp.up_proj.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.1.self_attn.q_proj.weight",
            "model.norm.weight_rows",
            "model.layers.1.input_layernorm.weight",
        }

    def test_a_name_in_the_middle_or_with_a_wild_dot_does_not_match(self, tmp_path: Path) -> None:
        for entry in ("layers.1.mlp", "model.layers.1.mlp.up.proj", "nothing"):
            with pytest.raises(TargetError, match="1 of 1 entries"):
                attach(unfrozen_parameters=self.of(tmp_path, entry))

    def test_lists_for_a_wrapped_text_model_and_the_other_way_round(self) -> None:
        plain = {name: [name] for name in ("model.layers.0.up.weight", "model.layers.1.up.weight")}
        wrapped = {name.replace("model.", "model.language_model.", 1): [] for name in plain}
        wrapped = {name: [name] for name in wrapped}
        of_plain, of_wrapped = ["model.layers.0.up"], ["model.language_model.layers.0.up"]
        for entries, names in ((of_plain, wrapped), (of_wrapped, plain)):
            (found,) = match_unfrozen(entries, names, "list").values()
            assert found == ((next(iter(names)),), None)
        # Spectrum's lists begin with the head, whose name is the same in both.
        entries = ["^lm_head.weight$", *of_plain]
        found = match_unfrozen(entries, {**wrapped, "lm_head.weight": ["lm_head.weight"]}, "list")
        assert [names for names, _ in found.values()] == [("lm_head.weight",), (next(iter(wrapped)),)]
        with pytest.raises(TargetError):
            match_unfrozen([*of_plain, "model.layers.7.up"], wrapped, "list")

    def test_a_file_that_is_no_list_is_refused(self, tmp_path: Path) -> None:
        for text in ("- a\n", "unfrozen_parameters: 3\n", "unfrozen_parameters: []\n", "a: [\n"):
            (tmp_path / "list.yaml").write_text(text)
            with pytest.raises(ConfigError, match="list"):
                attach(unfrozen_parameters=str(tmp_path / "list.yaml"))
        with pytest.raises(ConfigError, match="cannot be read"):
            attach(unfrozen_parameters=str(tmp_path / "absent.yaml"))


def test_a_frozen_half_below_halves_what_the_layers_keep_for_the_backward_pass() -> None:
    def kept(**config: Any) -> int:
        method, model = attach(tiny_llama(layers=8), **config)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        alive: list[weakref.ref[Any]] = []

        class Kept:
            def __init__(self, tensor: torch.Tensor) -> None:
                self.tensor = tensor
                if tensor.untyped_storage().data_ptr() not in own:
                    alive.append(weakref.ref(self))

        # What is packed for a graph that is thrown away at once is gone when the forward pass ends.
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda one: one.tensor):
            loss = model(input_ids=token_batch(2, 64), labels=token_batch(2, 64)).loss
        storages = {one.tensor.untyped_storage().data_ptr(): one.tensor for ref in alive if (one := ref()) is not None}
        assert loss.requires_grad
        del method
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    nothing = kept(train=["model.norm"])  # the head's part
    everything, half = (kept(train=[layers, "model.norm"]) - nothing for layers in ("layers:0-7", "layers:4-7"))
    assert half / everything == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("config", "error", "part"),
    [
        ({}, ConfigError, "neither what trains"),
        ({"train": ["attn"], "freeze": ["**"]}, TargetError, "everything is frozen"),
        ({"train": ["transformer.h.*"]}, TargetError, "matches no parameter"),
        ({"freeze": ["model.layers.9"]}, TargetError, "matches no parameter"),
        ({"train": [f"{EMBEDDING}[300:400]"]}, TargetError, "rows 0 to 319"),
        ({"train": [f"{EMBEDDING}[7:7]"]}, TargetError, "[7:7]"),
        ({"freeze": [f"{EMBEDDING}[0:300]"]}, ConfigError, "training the others"),
    ],
)
def test_what_cannot_be_is_said(config: dict[str, Any], error: type[FinetuneError], part: str) -> None:
    with pytest.raises(error) as caught:
        attach(**config)
    assert part in str(caught.value)


def test_rows_of_experts_and_what_a_later_method_may_choose_from() -> None:
    base = tiny_mixtral()
    name = "model.layers.0.mlp.experts.down_proj"
    method, model = attach(copy.deepcopy(base), train=[f"{name}[1:2]"])  # one expert
    train(method, model, 3)
    before, after = (m.get_submodule("model.layers.0.mlp.experts")._parameters["down_proj"] for m in (base, model))
    assert (before != after).flatten(1).any(1).tolist() == [False, True, False]
    pair = finetune.methods.build_method([{"name": "freeze", "train": ["attn"]}, {"name": "random", "budget": 0.1}])
    pair.attach(tiny_llama())
    assert all("self_attn" in touched for touched in pair.touched())
    pair = finetune.methods.build_method([{"name": "freeze", "train": [f"{EMBEDDING}[1:]"]}, {"name": "random"}])
    with pytest.raises(CapabilityError, match="rows of a parameter"):
        pair.attach(tiny_llama())
