"""S2FT beyond columns chosen at random: scores, rows, the delta form, the fused block, choices that avoid others."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.pytorch_utils import Conv1D

import finetune
from finetune.core.errors import CapabilityError, TargetError
from finetune.methods import build_method
from finetune.methods.primitives.slice_delta import SliceDelta, add_slice_delta
from finetune.methods.primitives.weight_slice import COLUMNS, ROWS, WeightSlice, oriented_weight, slice_weight
from support.steps import adamw, take_steps
from support.tiny import VOCABULARY, tiny_gpt2, tiny_llama, tiny_phi3, token_batch

IDS = token_batch(3, 11)
CALIBRATION = [{"input_ids": IDS[:2], "labels": IDS[:2]}, {"input_ids": IDS[2:], "labels": IDS[2:]}]
ROW_RATIOS = {"o_ratio": 0, "down_ratio": 0, "v_ratio": 0.5, "up_ratio": 0.25, "gate_ratio": 0.125}


def sliced(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if isinstance(m, WeightSlice | SliceDelta)}


def dense_gradient(model: Any, name: str) -> torch.Tensor:
    """Returns the gradient of a layer's weight by plain autograd, as (out, in)."""
    model = copy.deepcopy(model).requires_grad_(False)
    layer = model.get_submodule(name)
    layer.weight.requires_grad_(True)
    model(input_ids=IDS, labels=IDS).loss.backward()
    return layer.weight.grad.t() if isinstance(layer, Conv1D) else layer.weight.grad


def test_rows_of_the_worked_example() -> None:
    layer = nn.Linear(3, 2, bias=False).requires_grad_(False)
    layer.weight.data = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    rows = slice_weight(layer, torch.tensor([1]), axis=ROWS)
    x = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]], requires_grad=True)
    rows(x).sum().backward()
    assert rows.rows.grad.t().tolist() == [[1.0, 1.0, 3.0]]
    assert x.grad.tolist() == [[5.0, 7.0, 9.0]] * 2
    torch.optim.SGD([rows.rows], lr=0.1).step()
    rows.write()
    torch.testing.assert_close(rows.weight, torch.tensor([[1.0, 2.0, 3.0], [3.9, 4.9, 5.7]]))


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("axis", [ROWS, COLUMNS])
@pytest.mark.parametrize("form", ["inplace", "delta"])
@pytest.mark.parametrize("shape", [(5, 12), (2, 5, 12)])
def test_gradients_of_slices_are_those_of_the_dense_weight_in_float64(
    kind: Any, axis: int, form: str, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    dense = (nn.Linear(12, 7) if kind is nn.Linear else Conv1D(7, 12)).double()
    nn.init.normal_(dense.bias)
    layer = copy.deepcopy(dense).requires_grad_(False)
    index = torch.tensor([5, 0, 3])
    layer = slice_weight(layer, index, axis=axis) if form == "inplace" else add_slice_delta(layer, index, axis=axis)
    layer.trained.data = layer.trained.data.double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    again = x.detach().clone().requires_grad_(True)
    seed = torch.randn(*shape[:-1], 7, dtype=torch.float64)
    y = dense(x)
    y.backward(seed)
    z = layer(again)
    z.backward(seed)
    torch.testing.assert_close(z, y, atol=1e-14, rtol=1e-13)
    expected = dense.weight.grad if kind is nn.Linear else dense.weight.grad.t()
    part = expected.index_select(axis, torch.tensor([0, 3, 5])).movedim(axis, -1)
    torch.testing.assert_close(layer.trained.grad, part, atol=1e-14, rtol=1e-13)
    torch.testing.assert_close(again.grad, x.grad, atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_phi3])
def test_rows_of_values_and_of_the_feed_forward_train(build: Any) -> None:
    base = build()
    gate = {"gate_ratio": 0} if build is tiny_gpt2 else {}
    method = finetune.method("s2ft", **{**ROW_RATIOS, **gate})
    model = method.attach(copy.deepcopy(base))
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert sliced(model)
    for name, layer in sliced(model).items():
        expected = dense_gradient(base, name).index_select(0, layer.slice_index)
        torch.testing.assert_close(layer.rows.grad.t(), expected, atol=1e-6, rtol=1e-4)
    heads = 4 if build is tiny_gpt2 else 2
    values = [layer for name, layer in sliced(model).items() if name.endswith(("v_proj", "c_attn", "qkv_proj"))]
    first = {tiny_llama: 0, tiny_gpt2: 64, tiny_phi3: 48}[build]
    for layer in values:
        places = (layer.slice_index - first).reshape(-1, 8)
        assert len(places) == heads // 2
        assert all(place.tolist() == list(range(int(place[0]), int(place[0]) + 8)) for place in places)
        assert int(places.min()) >= 0
        assert int(places[:, 0].max()) % 8 == 0


def test_fused_projections_train_the_rows_of_both_halves() -> None:
    model = tiny_phi3()
    finetune.method("s2ft", **ROW_RATIOS).attach(model)
    index = model.model.layers[0].mlp.gate_up_proj.slice_index
    assert int((index < 48).sum()) == 6  # an eighth of 48 channels of the gate
    assert int((index >= 48).sum()) == 12  # a quarter of the up projection's


def test_interleaved_query_key_values_are_refused() -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.query_key_value = layer.self_attn.v_proj
        del layer.self_attn.v_proj
    with pytest.raises(TargetError, match="no layer for v_ratio"):
        finetune.method("s2ft", v_ratio=0.5).attach(model)


@pytest.mark.parametrize("multi_query", [True, False])
def test_values_fused_with_keys_train_where_they_stand_in_one_piece(multi_query: bool) -> None:
    """GPT-BigCode has them last under multi-query attention, and per head (query, key, value) otherwise."""
    shape = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    config = GPTBigCodeConfig(**shape, multi_query=multi_query, bos_token_id=1, eos_token_id=2)
    model = GPTBigCodeForCausalLM(config)
    method = finetune.method("s2ft", o_ratio=0, down_ratio=0, v_ratio=1)
    if multi_query:
        ((name, layer),) = sliced(method.attach(model)).items()
        assert name.endswith("attn.c_attn")
        assert layer.slice_index.tolist() == list(range(32 + 8, 32 + 8 + 8))
    else:
        with pytest.raises(TargetError, match="no layer for v_ratio"):
            method.attach(model)


def reference_scores(model: Any, name: str, select: str) -> torch.Tensor:
    """Returns the score of each column by its definition, in float64."""
    layer = model.get_submodule(name)
    weight = oriented_weight(layer).detach().double()
    inputs: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach().double()))
    with torch.no_grad():
        for batch in CALIBRATION:
            model(input_ids=batch["input_ids"])
    handle.remove()
    activation = torch.cat([x.reshape(-1, x.shape[-1]) for x in inputs]).norm(dim=0)
    if select == "gradient":
        squares = torch.zeros(weight.shape[1]).double()
        for batch in CALIBRATION:
            copied = copy.deepcopy(model)
            copied(**batch).loss.backward()
            gradient = oriented_weight(copied.get_submodule(name)).grad
            if gradient is None:
                gradient = copied.get_submodule(name).weight.grad.t()
            squares += gradient.double().square().sum(0)
        return squares.sqrt()
    return {"weight": weight.norm(dim=0), "activation": activation, "product": weight.norm(dim=0) * activation}[select]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("select", ["weight", "activation", "product", "gradient"])
@pytest.mark.parametrize("pick", ["largest", "smallest"])
def test_selection_by_each_score(build: Any, select: str, pick: str) -> None:
    base = build()
    base.eval()
    method = finetune.method("s2ft", o_ratio=0, down_ratio=0.25, select=select, pick=pick)
    model = method.attach(copy.deepcopy(base), calibration=CALIBRATION)
    for name, layer in sliced(model).items():
        scores = reference_scores(base, name, select)
        count = layer.slice_index.numel()
        assert count == scores.numel() // 4
        expected = scores.topk(count, largest=pick == "largest").indices.sort().values
        assert torch.equal(layer.slice_index, expected), name
    assert [n for n, p in model.named_parameters() if p.requires_grad] == list(method.trained_parameters())


@pytest.mark.parametrize("select", ["weight", "activation", "product"])
def test_a_head_is_scored_by_all_its_columns_and_a_key_value_head_by_its_query_heads(select: str) -> None:
    base = tiny_llama()
    base.eval()
    method = finetune.method("s2ft", o_ratio=0.25, down_ratio=0, v_ratio=0.5, select=select, pick="largest")
    model = method.attach(copy.deepcopy(base), calibration=CALIBRATION)
    for number in range(2):
        columns = reference_scores(
            base, f"model.layers.{number}.self_attn.o_proj", "weight" if select == "weight" else "activation"
        )
        if select == "product":
            weights = reference_scores(base, f"model.layers.{number}.self_attn.o_proj", "weight")
            heads = (columns.square() * weights.square()).reshape(4, 8).sum(1)
        else:
            heads = columns.square().reshape(4, 8).sum(1)
        attention = model.model.layers[number].self_attn
        best, values = int(heads.argmax()), int(heads.reshape(2, 2).sum(1).argmax())
        assert attention.o_proj.slice_index.tolist() == list(range(8 * best, 8 * best + 8))
        assert attention.v_proj.slice_index.tolist() == list(range(8 * values, 8 * values + 8))


def test_padding_does_not_count_in_activations() -> None:
    padded = {
        "input_ids": torch.cat([IDS, torch.full((3, 4), 2)], 1),
        "labels": torch.cat([IDS, torch.full((3, 4), -100)], 1),
        "attention_mask": torch.cat([torch.ones_like(IDS), torch.zeros(3, 4, dtype=torch.int64)], 1),
    }
    chosen = []
    for calibration in ([padded], [{"input_ids": IDS, "labels": IDS}]):
        method = finetune.method("s2ft", ratio=0.2, select="activation")
        model = method.attach(tiny_llama(), calibration=calibration)
        chosen.append({name: layer.slice_index.tolist() for name, layer in sliced(model).items()})
    assert chosen[0] == chosen[1]


def test_scores_of_data_need_data_and_loading_does_not(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="chooses what trains by data"):
        finetune.method("s2ft", select="activation").attach(tiny_llama())
    method = finetune.method("s2ft", select="gradient", ratio=0.2)
    model = method.attach(tiny_llama(), calibration=CALIBRATION)
    take_steps(model, adamw(method), range(3))
    method.save(tmp_path)
    again = finetune.method("s2ft", select="gradient", ratio=0.2)
    fresh = again.attach(tiny_llama(), learned=tmp_path)
    assert torch.equal(fresh(IDS).logits, model(IDS).logits)
    assert finetune.method("s2ft", select="activation").calibration_examples(250) == 3
    assert finetune.method("s2ft", select="activation", calibration=40).calibration_examples(250) == 40


@pytest.mark.parametrize("select", ["activation", "product", "gradient"])
def test_a_choice_by_data_loads_where_the_ratio_leaves_a_remainder(select: str, tmp_path: Path) -> None:
    """7.2 heads and 31.68 channels over 6 layers: which layers get one more must not depend on the calibration."""
    base, options = tiny_llama(layers=6), {"o_ratio": 0.3, "down_ratio": 0.11, "v_ratio": 0.3, "select": select}
    method = finetune.method("s2ft", **options)
    method.attach(copy.deepcopy(base), calibration=CALIBRATION)
    method.save(tmp_path)
    again = finetune.method("s2ft", **options)
    again.attach(copy.deepcopy(base), learned=tmp_path)
    found, expected = again.state_dict(), method.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_blocks_that_another_method_left_are_scored_by_their_own_columns() -> None:
    base = tiny_llama(layers=4)
    members = [
        {"name": "top_layers", "count": 1},
        {"name": "s2ft", "o_ratio": 0, "down_ratio": 0.1, "select": "weight"},
    ]
    model = build_method(members).attach(copy.deepcopy(base))
    ((name, layer),) = sliced(model).items()
    assert name == "model.layers.3.mlp.down_proj"
    norms = base.get_submodule(name).weight.norm(dim=0)
    assert layer.slice_index.tolist() == sorted(norms.argsort()[:5].tolist())


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_all_head_layouts_and_a_head_width_of_its_own(key_heads: int) -> None:
    model = tiny_llama(num_key_value_heads=key_heads, head_dim=16)
    base = copy.deepcopy(model)
    finetune.method("s2ft", o_ratio=0.5, down_ratio=0.1, v_ratio=1.0).attach(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    for name, layer in sliced(model).items():
        axis = layer.slice_axis
        expected = dense_gradient(base, name).index_select(axis, layer.slice_index).movedim(axis, -1)
        torch.testing.assert_close(layer.trained.grad, expected, atol=1e-6, rtol=1e-4)
    attention = model.model.layers[0].self_attn
    assert attention.o_proj.slice_index.numel() == 2 * 16
    assert attention.v_proj.slice_index.numel() == key_heads * 16


def test_the_published_set_up_of_llama_2_7b() -> None:
    """Spec 3.4: 53 heads and 7045 channels, 56.6 M parameters, 0.84 %."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    method = finetune.method("s2ft", o_ratio=0.052, down_ratio=0.02)
    method.attach(model)
    counts = {"o_proj": 0, "down_proj": 0}
    for name, layer in sliced(model).items():
        counts[name.rpartition(".")[2]] += layer.slice_index.numel()
    assert counts == {"o_proj": 53 * 128, "down_proj": 7045}
    assert method.summary().trained == (53 * 128 + 7045) * 4096 == 56_643_584
    assert method.summary().share == pytest.approx(0.0084, abs=5e-5)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_phi3])
@pytest.mark.parametrize("form", ["inplace", "delta"])
def test_rows_and_columns_save_load_merge_and_export(build: Any, form: str, tmp_path: Path) -> None:
    from peft import PeftModel

    base = build()
    ratios = {"o_ratio": 0.5, "down_ratio": 0.2, "up_ratio": 0.2}
    if build is tiny_llama:
        ratios |= {"v_ratio": 0.5, "gate_ratio": 0.1}
    method = finetune.method("s2ft", form=form, **ratios)
    model = method.attach(copy.deepcopy(base))
    take_steps(model, adamw(method), range(3))
    model.eval()
    with torch.no_grad():
        expected = model(IDS).logits
        assert (expected - base.eval()(IDS).logits).abs().max() > 0.1
        assert torch.equal(pickle.loads(pickle.dumps(model))(IDS).logits, expected)
        method.save(tmp_path / "out")
        again = finetune.method("s2ft", form=form, seed=0, **ratios)
        fresh = again.attach(copy.deepcopy(base))
        again.load(tmp_path / "out")
        assert torch.equal(fresh.eval()(IDS).logits, expected)
        loaded = finetune.load(copy.deepcopy(base), tmp_path / "out")
        torch.testing.assert_close(loaded(IDS).logits, expected, atol=1e-5, rtol=1e-5)
        method.export_adapter(tmp_path / "lora")
        adapted = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "lora")).eval()
        torch.testing.assert_close(adapted(IDS).logits, expected, atol=1e-5, rtol=1e-5)
        merged = method.merge()
        assert type(merged) is type(base)
        assert list(merged.state_dict()) == list(base.state_dict())
        torch.testing.assert_close(merged(IDS).logits, expected, atol=1e-5, rtol=1e-5)


def test_decay_towards_the_base_and_its_exact_resumption(tmp_path: Path) -> None:
    def start() -> tuple[Any, Any, Any]:
        method = finetune.method("s2ft", ratio=0.2, weight_decay_target="base")
        model = method.attach(tiny_llama(dtype=torch.bfloat16))
        return method, model, adamw(method, weight_decay=0.5)

    method, model, optimizer = start()
    take_steps(model, optimizer, range(3))
    method.save(tmp_path)
    moments = copy.deepcopy(optimizer.state_dict())
    take_steps(model, optimizer, range(3, 6))
    again, fresh, optimizer_again = start()
    again.load(tmp_path)
    optimizer_again.load_state_dict(moments)
    take_steps(fresh, optimizer_again, range(3, 6))
    expected = method.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in again.state_dict().items())
    for layer in sliced(model).values():
        layer.trained.grad = torch.zeros_like(layer.trained)
    plain = torch.optim.SGD(method.trained_parameters().values(), lr=1.0, weight_decay=0.5)
    for _ in range(60):
        plain.step()
    for layer in sliced(model).values():
        assert torch.equal(layer._take(), layer.slice_base)


def test_a_choice_avoids_those_of_other_adapters(tmp_path: Path) -> None:
    taken: dict[str, set[int]] = {}
    folders: list[str] = []
    for number in range(3):
        method = finetune.method("s2ft", o_ratio=0.25, down_ratio=0.25, up_ratio=0.25, exclude_adapters=folders)
        model = method.attach(tiny_llama())
        for name, layer in sliced(model).items():
            own = set(layer.slice_index.tolist())
            assert not own & taken.get(name, set())
            taken[name] = taken.get(name, set()) | own
        method.save(tmp_path / str(number))
        folders.append(str(tmp_path / str(number)))
    with pytest.raises(TargetError, match="too few attention heads are left") as caught:
        finetune.method("s2ft", o_ratio=0.5, down_ratio=0, exclude_adapters=folders).attach(tiny_llama())
    assert "exclude_adapters" in caught.value.fix


def test_what_was_learned_loads_when_the_adapters_it_avoided_are_gone(tmp_path: Path) -> None:
    base = tiny_llama()
    first = finetune.method("s2ft", ratio=0.1)
    first.attach(copy.deepcopy(base))
    first.save(tmp_path / "first")
    options = {"ratio": 0.1, "exclude_adapters": [str(tmp_path / "first")]}
    second = finetune.method("s2ft", **options)
    second.attach(copy.deepcopy(base))
    second.save(tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    again = finetune.method("s2ft", **options)
    again.attach(copy.deepcopy(base), learned=tmp_path / "second")
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in second.state_dict().items())


def test_a_choice_avoids_adapters_within_a_composition_too(tmp_path: Path) -> None:
    from finetune.methods import build_method

    first = finetune.method("s2ft", o_ratio=0.5, down_ratio=0.5)
    taken = {name: set(layer.slice_index.tolist()) for name, layer in sliced(first.attach(tiny_llama())).items()}
    first.save(tmp_path)
    own = {"name": "s2ft", "o_ratio": 0.5, "down_ratio": 0.5, "exclude_adapters": [str(tmp_path)]}
    method = build_method([{"name": "top_layers", "count": 1}, own])
    model = method.attach(tiny_llama())
    assert sliced(model)
    for name, layer in sliced(model).items():
        assert not taken[name] & set(layer.slice_index.tolist())


def test_the_fused_block_gives_the_same_gradients_and_keeps_less() -> None:
    kept: list[int] = []
    gradients: list[dict[str, torch.Tensor]] = []
    for fused in (False, True):
        model = tiny_llama(dtype=torch.float64)
        method = finetune.method("s2ft", o_ratio=0.5, down_ratio=0.1, up_ratio=0.1, fused_mlp=fused)
        method.attach(model)
        for parameter in method.trained_parameters().values():
            parameter.data = parameter.data.double()
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        kept.append(sum(storages.values()))
        gradients.append({name: p.grad for name, p in method.trained_parameters().items()})
        assert len(pickle.dumps(model)) > 0
        assert type(method.merge()(IDS).logits) is torch.Tensor
        assert "forward" not in model.model.layers[0].mlp.__dict__
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-14, rtol=1e-12)
    # Per block: silu(g) and the slice of the product, float64; what is kept instead exists anyway.
    assert kept[0] - kept[1] >= 2 * IDS.numel() * 48 * 8


def test_blocks_that_cannot_be_fused_are_refused() -> None:
    with pytest.raises(TargetError, match="can be fused"):
        finetune.method("s2ft", fused_mlp=True).attach(tiny_gpt2())
    with pytest.raises(TargetError, match="can be fused"):
        finetune.method("s2ft", fused_mlp=True).attach(tiny_llama(hidden_act="gelu"))


def test_blocks_that_clamp_their_branches_or_have_more_parts_are_not_fused() -> None:
    class Clamped(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-7, 7))

    class Dropping(LlamaMLP):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))

    for kind in (Clamped, Dropping):
        model = tiny_llama(layers=1)
        model.model.layers[0].mlp = kind(model.config).eval()
        with pytest.raises(TargetError, match="can be fused"):
            finetune.method("s2ft", fused_mlp=True, ratio=0.2).attach(model)


@pytest.mark.parametrize(
    "options", [{}, ROW_RATIOS, {"fused_mlp": True}, {"form": "delta"}, {"form": "delta", **ROW_RATIOS}]
)
def test_torch_compile_traces_every_form_without_a_graph_break(options: dict[str, Any]) -> None:
    model = finetune.method("s2ft", **{"ratio": 0.2, **options}).attach(tiny_llama(layers=1))
    part = model.model.layers[0].mlp
    x = torch.randn(2, 5, 32)
    compiled = torch.compile(part, fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    trained = {name: p for name, p in part.named_parameters() if p.requires_grad}
    assert trained
    expected = {name: p.grad.clone() for name, p in trained.items()}
    part.zero_grad()
    part(x).sum().backward()
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_trains_in_delta_form(bits: int, tmp_path: Path) -> None:
    quantised = pytest.importorskip("bitsandbytes").nn

    def build() -> Any:
        # Some CPUs' 4-bit kernels need whole blocks of 64 numbers in each row.
        model = tiny_llama(hidden_size=64, intermediate_size=128)
        for name, layer in list(model.named_modules()):
            if isinstance(layer, nn.Linear) and "lm_head" not in name:
                sizes = (layer.in_features, layer.out_features)
                if bits == 4:
                    new = quantised.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
                else:
                    new = quantised.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
                new.load_state_dict(layer.state_dict())
                model.set_submodule(name, new.to("cpu"))
        model(IDS)  # the 8-bit kernel lays its weights out anew at the first call
        return model

    with pytest.raises(TargetError, match="in place") as caught:
        finetune.method("s2ft", ratio=0.2).attach(build())
    assert "method.form: delta" in caught.value.fix
    with pytest.raises(TargetError, match="quantised"):
        finetune.method("s2ft", ratio=0.2, form="delta", select="weight").attach(build())
    method = finetune.method("s2ft", ratio=0.2, form="delta", select="activation")
    model = method.attach(build(), calibration=CALIBRATION)
    weights = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    first = model(input_ids=IDS, labels=IDS).loss.item()
    take_steps(model, adamw(method), range(8))
    assert model(input_ids=IDS, labels=IDS).loss.item() < first
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters() if name in weights)
    method.save(tmp_path)
    again = finetune.method("s2ft", ratio=0.2, form="delta", select="activation")
    fresh = again.attach(build(), learned=tmp_path)
    with torch.no_grad():  # bitsandbytes has other kernels for inputs that need gradients
        expected = model.eval()(IDS).logits
        assert torch.equal(fresh.eval()(IDS).logits, expected)
        assert torch.equal(finetune.load(build(), tmp_path)(IDS).logits, expected)
    with pytest.raises(CapabilityError, match="cannot take up the change") as refusal:
        method.merge()
    assert "--to peft" in refusal.value.fix
