"""S2FT: the slice layer against hand-worked numbers and dense autograd, the selection, the exports."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import finetune
from finetune.core.errors import CheckpointError, FinetuneWarning, TargetError
from finetune.methods.primitives.step_sync import after_optimizer_step
from finetune.methods.primitives.weight_slice import (
    WeightSlice,
    oriented_weight,
    slice_weight,
    stored_axis,
    unslice_weight,
)
from support.tiny import tiny_gpt2, tiny_llama, token_batch

WEIGHT = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def layer_of(kind: type, weight: list[list[float]], bias: list[float] | None = None) -> nn.Module:
    tensor = torch.tensor(weight)
    if kind is Conv1D:
        layer = Conv1D(tensor.shape[0], tensor.shape[1])
        layer.weight.data = tensor.t().contiguous()
        layer.bias.data = torch.tensor(bias or [0.0] * len(weight))
    else:
        layer = nn.Linear(tensor.shape[1], tensor.shape[0], bias=bias is not None)
        layer.weight.data = tensor
        if bias is not None:
            layer.bias.data = torch.tensor(bias)
    return layer.requires_grad_(False)


def slices(model: nn.Module) -> dict[str, WeightSlice]:
    return {name: module for name, module in model.named_modules() if isinstance(module, WeightSlice)}


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_the_worked_example_of_the_spec(kind: type) -> None:
    layer = slice_weight(layer_of(kind, WEIGHT), torch.tensor([2]))
    x = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]], requires_grad=True)
    y = layer(x)
    assert y.tolist() == [[7.0, 16.0], [5.0, 11.0]]
    y.sum().backward()
    assert layer.columns.grad.tolist() == [[3.0], [3.0]]
    assert x.grad.tolist() == [[5.0, 7.0, 9.0]] * 2
    torch.optim.SGD([layer.columns], lr=0.1).step()
    layer.write()
    torch.testing.assert_close(oriented_weight(layer), torch.tensor([[1.0, 2.0, 2.7], [4.0, 5.0, 5.7]]))
    assert type(unslice_weight(layer)) is kind


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("shape", [(5, 12), (2, 5, 12), (2, 3, 5, 12)])
def test_the_gradient_is_the_slice_of_the_dense_one_in_float64(kind: type, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(7, 12).tolist(), torch.randn(7).tolist()
    index = torch.tensor([9, 0, 4])
    dense = layer_of(kind, weight, bias).double().requires_grad_(True)
    layer = slice_weight(layer_of(kind, weight, bias).double(), index)
    layer.columns.data = layer.columns.data.double()  # a master of its own precision hides nothing here
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    again = x.detach().clone().requires_grad_(True)
    seed = torch.randn(*shape[:-1], 7, dtype=torch.float64)
    dense(x).backward(seed)
    layer(again).backward(seed)
    expected = dense.weight.grad if kind is nn.Linear else dense.weight.grad.t()
    torch.testing.assert_close(layer.columns.grad, expected[:, [0, 4, 9]], atol=1e-14, rtol=1e-13)
    torch.testing.assert_close(again.grad, x.grad, atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_a_model_trains_as_if_only_these_columns_trained_by_dense_autograd(build: Any) -> None:
    """AdamW with decay on the slices equals AdamW on dense weights whose other entries are reset after every step."""
    base = build()
    dense, model = copy.deepcopy(base).requires_grad_(False), copy.deepcopy(base)
    method = finetune.method("s2ft", ratio=0.2)
    method.attach(model)
    chosen = {name: (layer.slice_index, stored_axis(layer)) for name, layer in slices(model).items()}
    weights = {name: dense.get_submodule(name).weight.requires_grad_(True) for name in chosen}
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizers = [
        torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False)
        for parameters in (method.trained_parameters().values(), weights.values())
    ]
    ids = token_batch(3, 11)
    for _ in range(5):
        for network, optimizer in zip((model, dense), optimizers, strict=True):
            network(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for name, weight in weights.items():
                index, axis = chosen[name]
                kept = weight.index_select(axis, index)
                weight.copy_(start[name])
                weight.index_copy_(axis, index, kept)
    for name, weight in weights.items():
        torch.testing.assert_close(model.get_submodule(name).weight, weight.detach(), atol=2e-6, rtol=1e-5)


def test_the_input_of_a_sliced_layer_is_not_kept() -> None:
    layer = slice_weight(layer_of(nn.Linear, torch.randn(8, 64).tolist()), torch.tensor([1, 5, 60]))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(100, 64, requires_grad=True))
    shapes = sorted(tuple(tensor.shape) for tensor in kept)
    assert shapes == [(8, 64), (100, 3)]  # the weight by reference, and the selected columns of the input


def test_fused_adamw_is_followed_although_it_leaves_the_version_counter() -> None:
    model = tiny_llama()
    method = finetune.method("s2ft", ratio=0.2)
    method.attach(model)
    optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2, fused=True)
    ids = token_batch()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    for layer in slices(model).values():
        written = oriented_weight(layer).index_select(1, layer.slice_index)
        assert torch.equal(written, layer.columns.detach())
        assert not torch.equal(written, layer.slice_base)


def test_a_hook_goes_with_its_method_and_leaves_other_optimizers_alone() -> None:
    class Owner:
        calls = 0

        def act(self, optimizer: torch.optim.Optimizer) -> None:
            Owner.calls += 1

    mine, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    mine.grad = other.grad = torch.ones(1)
    owner = Owner()
    after_optimizer_step([mine], owner.act)
    torch.optim.SGD([other], lr=0.1).step()
    assert Owner.calls == 0
    torch.optim.SGD([other, mine], lr=0.1).step()
    assert Owner.calls == 1
    del owner
    torch.optim.SGD([mine], lr=0.1).step()
    assert Owner.calls == 1


def test_writing_between_forward_and_backward_raises_instead_of_a_wrong_gradient() -> None:
    layer = slice_weight(layer_of(nn.Linear, WEIGHT), torch.tensor([2]))
    out = layer(torch.ones(1, 3, requires_grad=True))
    layer.write()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_float32_master_keeps_steps_that_bfloat16_would_round_away() -> None:
    """Spec 1.2: of 100 steps of 1e-5 on N(0, 0.02^2) weights bfloat16 alone makes 16 % of the way, the master 99 %."""
    torch.manual_seed(0)
    weight = (torch.randn(64, 128) * 0.02).bfloat16()
    layer = nn.Linear(128, 64, bias=False).bfloat16().requires_grad_(False)
    layer.weight.data = weight.clone()
    sliced = slice_weight(layer, torch.arange(128))
    with torch.no_grad():
        for _ in range(100):
            sliced.columns.add_(1e-5)
            sliced.write()
    moved = (sliced.weight.float() - weight.float()).mean() / 1e-3
    assert 0.95 < float(moved) < 1.05
    assert sliced.weight.dtype == torch.bfloat16


def test_the_total_is_exact_and_layers_differ_by_one_at_most() -> None:
    model = finetune.method("s2ft", o_ratio=0.3, down_ratio=0.11).attach(tiny_llama(layers=6))
    counts: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in ("o_proj", "down_proj"):
            counts.setdefault(kind, []).append(len(module.slice_index) if isinstance(module, WeightSlice) else 0)
    # 24 heads of 8 columns: 7.2 heads; 6 x 48 channels: 31.68.
    assert sum(counts["o_proj"]) == 7 * 8
    assert sum(counts["down_proj"]) == 32
    assert set(counts["o_proj"]) == {8, 16}
    assert max(counts["down_proj"]) - min(counts["down_proj"]) == 1


def test_layers_that_get_nothing_are_warned_of() -> None:
    method = finetune.method("s2ft", o_ratio=0.1, down_ratio=0.1)
    with pytest.warns(FinetuneWarning, match="no attention head in 4 of 6 layers"):
        method.attach(tiny_llama(layers=6))


def test_ratio_is_a_share_of_the_block_linears_half_heads_half_channels() -> None:
    model = tiny_llama()
    linears = sum(m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in n)
    method = finetune.method("s2ft", ratio=0.1)
    method.attach(model)
    trained = {"o_proj": 0, "down_proj": 0}
    for name, layer in slices(model).items():
        trained[name.rpartition(".")[2]] += layer.columns.numel()
    assert trained["o_proj"] == pytest.approx(0.05 * linears, abs=8 * 32)  # one head
    assert trained["down_proj"] == pytest.approx(0.05 * linears, abs=32)  # one channel


@pytest.mark.parametrize(("pick", "expected"), [("largest", [2, 5]), ("smallest", [0, 3])])
def test_selection_by_weight_takes_the_columns_of_that_norm(pick: str, expected: list[int]) -> None:
    model = tiny_llama(layers=1)
    weight = model.get_submodule("model.layers.0.mlp.down_proj").weight
    with torch.no_grad():
        weight.copy_(torch.ones_like(weight))
        weight[:, [2, 5]] = 3.0
        weight[:, [0, 3]] = -0.1
    finetune.method("s2ft", o_ratio=0, down_ratio=2 / 48, select="weight", pick=pick).attach(model)
    ((_, layer),) = slices(model).items()
    assert layer.slice_index.tolist() == expected


def test_every_query_head_can_be_chosen_under_grouped_query_attention() -> None:
    seen = set()
    for seed in range(20):
        model = tiny_llama(layers=1)  # 4 query heads, 2 key-value heads
        finetune.method("s2ft", o_ratio=0.25, down_ratio=0, seed=seed).attach(model)
        ((_, layer),) = slices(model).items()
        head = int(layer.slice_index[0]) // 8
        assert layer.slice_index.tolist() == list(range(8 * head, 8 * head + 8))
        seen.add(head)
    assert seen == {0, 1, 2, 3}


def test_the_same_seed_chooses_the_same_and_the_keys_stay_the_bases() -> None:
    chosen = []
    for seed in (1, 1, 2):
        model = tiny_llama()
        keys = list(model.state_dict())
        finetune.method("s2ft", ratio=0.2, seed=seed).attach(model)
        assert list(model.state_dict()) == keys
        chosen.append([layer.slice_index.tolist() for layer in slices(model).values()])
    assert chosen[0] == chosen[1] != chosen[2]


def test_a_stock_checkpoint_of_the_whole_model_loads_and_moves_the_slices(tmp_path: Path) -> None:
    trained = tiny_llama(seed=5)
    model = tiny_llama()
    finetune.method("s2ft", ratio=0.2).attach(model)
    model.load_state_dict(trained.state_dict())
    for layer in slices(model).values():
        assert torch.equal(layer.columns, oriented_weight(layer).index_select(1, layer.slice_index))


def test_a_state_for_another_base_is_refused(tmp_path: Path) -> None:
    method = finetune.method("s2ft", ratio=0.2)
    method.attach(tiny_llama(seed=0))
    method.save(tmp_path)
    other = finetune.method("s2ft", ratio=0.2)
    other.attach(tiny_llama(seed=1))
    with pytest.raises(CheckpointError, match="base"):
        other.load(tmp_path)
    with pytest.raises(CheckpointError, match="another base model"):
        other.load_state_dict(method.state_dict())


def test_layers_that_cannot_be_sliced_are_named() -> None:
    class Quantised(nn.Linear):
        pass

    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = Quantised
    with pytest.raises(TargetError) as caught:
        finetune.method("s2ft").attach(model)
    assert "Quantised" in caught.value.what
    assert caught.value.where == "model.layers.0.mlp.down_proj"
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.other = layer.mlp.down_proj
        del layer.mlp.down_proj
    with pytest.raises(TargetError, match="no layer for down_ratio"):
        finetune.method("s2ft").attach(model)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_the_exported_adapter_is_exact_in_stock_peft(build: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    base, ids = build(), token_batch()
    method = finetune.method("s2ft", ratio=0.2)
    model = method.attach(copy.deepcopy(base))
    optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    method.export_adapter(tmp_path / "lora")
    before = base(ids).logits
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "lora"))
    with torch.no_grad():
        tuned = model(ids).logits
        assert (tuned - before).abs().max() > 0.1
        torch.testing.assert_close(adapted(ids).logits, tuned, atol=1e-5, rtol=1e-5)


def test_torch_compile_traces_the_slice_without_a_graph_break() -> None:
    layer = slice_weight(layer_of(nn.Linear, WEIGHT), torch.tensor([0, 2]))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 3)
    compiled(x).sum().backward()
    expected, layer.columns.grad = layer.columns.grad, None
    layer(x).sum().backward()
    torch.testing.assert_close(expected, layer.columns.grad)
