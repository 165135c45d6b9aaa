"""CoFiTune: which rows train, how far each may move, and what their importance is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import finetune
from finetune.core.errors import CheckpointError, ConfigError, TargetError
from finetune.methods.primitives.parameter_patterns import layer_range
from finetune.methods.primitives.unit_importance import Gate, normalized, unit_importance
from support.processes import one_and_two_processes
from support.tiny import tiny_gpt2, tiny_llama, tiny_mixtral, tiny_phi3, token_batch

ROWS = token_batch(4, 12)
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def importance_file(folder: Path, **layers: Tensor) -> str:
    path = folder / "importance.safetensors"
    save_file({name.replace("__", "."): value for name, value in layers.items()}, path)
    return str(path)


def with_mask(folder: Path, wanted: Tensor, **config: Any) -> tuple[Any, Any]:
    """Returns an attached method whose up rows have the importance ``wanted``, unnormalised, and the model."""
    method = finetune.method("cofitune", layers="0", modules=["up"], importance=[of_up(folder, wanted)], **config)
    model = method.attach(tiny_llama())
    method._rows[f"{UP}.weight"].scale = 1 - wanted  # type: ignore[attr-defined]
    return method, model


def of_up(folder: Path, values: Tensor) -> str:
    return importance_file(folder, **{UP.replace(".", "__"): values})


def step(model: Any, optimizer: torch.optim.Optimizer, rows: Tensor = ROWS) -> None:
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def weight_of(model: Any, name: str = UP) -> Tensor:
    return model.get_submodule(name)._parameters["weight"].detach().clone()


class TestWhatTrains:
    def test_up_and_down_of_the_second_quarter_by_default(self) -> None:
        method = finetune.method("cofitune", soft_mask=False)
        model = method.attach(tiny_llama(layers=8))
        wanted = {f"model.layers.{n}.mlp.{p}_proj.weight_rows" for n in (2, 3) for p in ("up", "down")}
        assert set(method.trained_parameters()) == wanted
        assert method.touched() == {name.removesuffix("_rows") for name in wanted}
        assert set(model.state_dict()) == set(tiny_llama(layers=8).state_dict())

    @pytest.mark.parametrize(("layers", "first", "last"), [(32, 8, 15), (40, 10, 19), (60, 15, 29), (30, 8, 14)])
    def test_the_second_quarter_of_published_depths(self, layers: int, first: int, last: int) -> None:
        found = layer_range("25%-50%", layers, "method.layers")
        assert (found[0], found[-1]) == (first, last)

    def test_parts_of_fused_layers_leave_the_other_rows_bit_identical(self, tmp_path: Path) -> None:
        base = tiny_phi3()
        method = finetune.method("cofitune", layers="0-1", modules=["q", "v", "up"], soft_mask=False)
        model = method.attach(copy.deepcopy(base))
        optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2, weight_decay=0.1)
        for _ in range(3):
            step(model, optimizer)
        fused, original = (weight_of(m, "model.layers.1.self_attn.qkv_proj") for m in (model, base))
        changed = (fused != original).any(1)
        # 4 query heads, 2 key heads and 2 value heads of width 8
        assert changed.tolist() == [True] * 32 + [False] * 16 + [True] * 16
        gate_up, original = (weight_of(m, "model.layers.1.mlp.gate_up_proj") for m in (model, base))
        assert (gate_up != original).any(1).tolist() == [False] * 48 + [True] * 48
        method.save(tmp_path)
        loaded = finetune.load(copy.deepcopy(base), tmp_path)
        assert torch.equal(loaded(input_ids=ROWS).logits, model(input_ids=ROWS).logits)
        again = finetune.method("cofitune", layers="0-1", modules=["q", "v", "up"], soft_mask=False)
        fresh = again.attach(copy.deepcopy(base), learned=tmp_path)
        assert torch.equal(fresh(input_ids=ROWS).logits, model(input_ids=ROWS).logits)

    def test_rows_of_conv1d_layers_are_their_output_features(self) -> None:
        base = tiny_gpt2()
        method = finetune.method("cofitune", layers="0", modules=["k", "down"], soft_mask=False)
        model = method.attach(copy.deepcopy(base))
        optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=1.0)
        step(model, optimizer)
        fused, original = (m.transformer.h[0].attn.c_attn for m in (model, base))
        changed = (fused._parameters["weight"] != original.weight).any(0)
        assert changed.tolist() == [False] * 32 + [True] * 32 + [False] * 32
        assert not torch.equal(
            model.transformer.h[0].mlp.c_proj._parameters["bias"], base.transformer.h[0].mlp.c_proj.bias
        )

    def test_an_earlier_method_narrows_it_to_the_bias(self) -> None:
        pair = [{"name": "freeze", "freeze": ["bias"]}, {"name": "cofitune", "layers": "0", "soft_mask": False}]
        method = finetune.methods.build_method(pair)
        method.attach(tiny_gpt2())
        assert method.touched() == {f"transformer.h.0.mlp.{layer}.weight" for layer in ("c_fc", "c_proj")}
        with pytest.raises(ConfigError, match="named once"):
            finetune.method("cofitune", modules=["up", "up"])

    def test_a_model_without_such_projections_is_refused(self) -> None:
        with pytest.raises(TargetError, match="no up projections"):
            finetune.method("cofitune", layers="0", soft_mask=False).attach(tiny_mixtral())
        with pytest.raises(TargetError, match="layers 0 to 1"):
            finetune.method("cofitune", layers="2-3", soft_mask=False).attach(tiny_llama())


class TestScaledUpdate:
    def test_equals_scaling_what_adam_does_to_each_row(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        wanted = torch.rand(48)
        method, model = with_mask(tmp_path, wanted)
        optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-3, weight_decay=0.0)
        reference = tiny_llama()
        for parameter in reference.parameters():
            parameter.requires_grad_(False)
        weight = reference.get_submodule(UP).weight.requires_grad_(True)  # type: ignore[union-attr, operator]
        first, second = torch.zeros(48, 32, dtype=torch.float64), torch.zeros(48, 32, dtype=torch.float64)
        change = torch.zeros(48, 32, dtype=torch.float64)
        base = weight.detach().double().clone()
        for number in range(1, 31):
            rows = token_batch(4, 12, seed=number)
            step(model, optimizer, rows)
            reference(input_ids=rows, labels=rows).loss.backward()
            gradient = weight.grad.double()
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            move = (first / (1 - 0.9**number)) / ((second / (1 - 0.999**number)).sqrt() + 1e-8)
            change -= 1e-3 * (1 - wanted.double())[:, None] * move
            weight.data.copy_(base + change)
            weight.grad = None
        found = weight_of(model).double() - base
        # Float32 weights of size 0.15 round by 1e-8.
        assert torch.allclose(found, change, rtol=1e-6, atol=5e-7)
        assert change.abs().max() > 1e-2

    def test_rows_of_importance_one_stay_bit_equal_and_others_move_in_proportion(self, tmp_path: Path) -> None:
        wanted = torch.zeros(48)
        wanted[5:9], wanted[20] = 1.0, 0.75
        base = weight_of(tiny_llama())
        _, model = with_mask(tmp_path, wanted)
        _, plain = with_mask(tmp_path, torch.zeros(48))
        for one in (model, plain):
            trained = [p for p in one.parameters() if p.requires_grad]
            step(one, torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1))
        moved, whole = weight_of(model) - base, weight_of(plain) - base
        assert torch.equal(weight_of(model)[5:9], base[5:9])
        assert torch.equal(moved[:5], whole[:5])
        assert torch.allclose(moved[20], 0.25 * whole[20], rtol=1e-6, atol=2e-8)

    def test_weight_decay_pulls_to_the_base(self, tmp_path: Path) -> None:
        method, model = with_mask(tmp_path, torch.zeros(48))
        base = weight_of(model)
        optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=1e-1, weight_decay=1.0)
        step(model, optimizer)
        changed = weight_of(model) - base
        (trained,) = method.trained_parameters().values()
        for _ in range(50):
            trained.grad = torch.zeros_like(trained)
            optimizer.step()
        assert (weight_of(model) - base).norm() < 0.01 * changed.norm()

    def test_scaled_gradients_do_nothing_under_adam_and_the_same_under_sgd(self, tmp_path: Path) -> None:
        wanted = torch.linspace(0, 0.95, 48)
        base = weight_of(tiny_llama())
        moved = {}
        for scale in ("update", "gradient"):
            for kind in (torch.optim.SGD, torch.optim.AdamW):
                method, model = with_mask(tmp_path, wanted, scale=scale)
                step(model, kind(method.trained_parameters().values(), lr=1e-3, weight_decay=0.0))
                moved[scale, kind] = weight_of(model) - base
        assert torch.allclose(moved["gradient", torch.optim.SGD], moved["update", torch.optim.SGD], atol=2e-8)
        alike = moved["gradient", torch.optim.AdamW].abs().mean(1)
        assert alike.max() / alike.min() < 1.001
        scaled = moved["update", torch.optim.AdamW].abs().mean(1)
        assert scaled.max() / scaled.min() > 15


class TestStateDicts:
    @pytest.mark.parametrize("wrapped", [False, True])
    def test_a_stock_state_dict_loaded_back_changes_nothing(self, tmp_path: Path, wrapped: bool) -> None:
        torch.manual_seed(0)
        wanted = torch.rand(48)
        wanted[:4] = 1.0
        method, model = with_mask(tmp_path, wanted)
        step(model, torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2))
        trained, weight = next(iter(method.trained_parameters().values())).detach().clone(), weight_of(model)
        holder = nn.ModuleDict({"module": model}) if wrapped else model
        stored = {key: tensor.clone() for key, tensor in holder.state_dict().items()}
        holder.load_state_dict(stored)
        assert torch.equal(weight_of(model), weight)
        assert torch.equal(next(iter(method.trained_parameters().values())), trained)
        # Into a fresh model: the weights have the say, and the change follows from them.
        again, fresh = with_mask(tmp_path, wanted)
        (nn.ModuleDict({"module": fresh}) if wrapped else fresh).load_state_dict(stored)
        assert torch.allclose(weight_of(fresh), weight, rtol=0, atol=1e-7)
        change = next(iter(again.trained_parameters().values()))
        assert torch.allclose(change[4:], trained[4:], rtol=1e-3, atol=1e-5)
        damaged = {key: tensor + 1 for key, tensor in stored.items()}
        with pytest.raises(CheckpointError, match="not to move"):
            (nn.ModuleDict({"module": fresh}) if wrapped else fresh).load_state_dict(damaged)


class TestImportance:
    def gates(self) -> dict[str, Gate]:
        return {
            "up": Gate(UP, False, 0, 48),
            "down": Gate(DOWN, False, 0, 32),
            "heads": Gate("model.layers.1.self_attn.o_proj", True, 0, 4, 8),
        }

    def test_equals_finite_differences_of_the_loss(self) -> None:
        model = tiny_gpt2(dtype=torch.float64).requires_grad_(
            False
        )  # a Llama's norms are float32 whatever its weights are
        gates = {
            "up": Gate("transformer.h.0.mlp.c_fc", False, 0, 128),
            "down": Gate("transformer.h.0.mlp.c_proj", False, 0, 32),
            "heads": Gate("transformer.h.1.attn.c_proj", True, 0, 4, 8),
        }
        batches = [{"input_ids": ROWS[:2], "labels": ROWS[:2]}, {"input_ids": ROWS[2:], "labels": ROWS[2:]}]
        found = unit_importance(model, gates, batches, estimator="loss_grad")
        for name, unit in (("up", 7), ("down", 31), ("heads", 2)):
            expected = sum(abs(_slope(model, gates[name], unit, ROWS[row : row + 1])) for row in range(4)) / 4
            assert found[name][unit].item() == pytest.approx(expected, rel=1e-5)
            assert expected > 1e-6

    def test_does_not_depend_on_batches_or_their_order_or_padding(self) -> None:
        model = tiny_llama()
        short = ROWS.clone()
        mask = torch.ones_like(short)
        mask[1, 8:] = 0
        labels = short.masked_fill(mask == 0, -100)
        whole = [{"input_ids": short, "labels": labels, "attention_mask": mask}]
        singly = [
            {"input_ids": short[n : n + 1, :end], "labels": labels[n : n + 1, :end]}
            for n, end in ((3, 12), (1, 8), (0, 12), (2, 12))
        ]
        one, other = (unit_importance(model, self.gates(), b, estimator="loss_grad") for b in (whole, singly))
        for name in one:
            assert torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-9)

    def test_divergence_between_passes_is_seeded_and_leaves_the_model_alone(self) -> None:
        model = tiny_llama()
        batches = [{"input_ids": ROWS, "labels": ROWS}]
        before = model(input_ids=ROWS).logits
        found = [
            unit_importance(model, self.gates(), batches, estimator="kl_dropout", seed=seed)["up"] for seed in (1, 1, 2)
        ]
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])
        assert found[0].max() > 1e-7  # without dropout both passes coincide
        assert torch.equal(model(input_ids=ROWS).logits, before)

    def test_normalised_by_hand(self) -> None:
        values = torch.tensor([1.0, 2.0, 3.0])  # standard deviation 1
        high = torch.tanh(torch.tensor(1.0)).item()
        assert normalized(values, "tanh_relu").tolist() == pytest.approx([0, 0, high])
        assert normalized(values, "tanh_abs").tolist() == pytest.approx([high, 0, high])
        assert normalized(torch.full((4,), 0.1), "tanh_abs").tolist() == [0, 0, 0, 0]

    def test_rows_follow_their_head_and_key_heads_the_mean_of_their_group(self, tmp_path: Path) -> None:
        heads = torch.tensor([4.0, 0.0, 1.0, 1.0])
        path = importance_file(tmp_path, **{"model__layers__0__self_attn__o_proj": heads})
        method = finetune.method("cofitune", layers="0", modules=["q", "k"], importance=[path])
        method.attach(tiny_llama())
        own = normalized(heads, "tanh_relu")
        assert own[0] > 0 == own[1]
        rows = method._rows  # type: ignore[attr-defined]
        expected = 1 - own.repeat_interleave(8)
        assert torch.equal(rows["model.layers.0.self_attn.q_proj.weight"].scale, expected)
        assert torch.equal(
            rows["model.layers.0.self_attn.k_proj.weight"].scale,
            1 - torch.tensor([own[0] / 2, 0.0]).repeat_interleave(8),
        )

    def test_several_files_give_the_maximum(self, tmp_path: Path) -> None:
        first, second = torch.randn(48).abs(), torch.randn(48).abs()
        files = []
        for number, values in enumerate((first, second)):
            (tmp_path / str(number)).mkdir()
            files.append(of_up(tmp_path / str(number), values))
        method = finetune.method("cofitune", layers="0", modules=["up"], importance=files)
        method.attach(tiny_llama())
        expected = 1 - torch.maximum(normalized(first, "tanh_relu"), normalized(second, "tanh_relu"))
        assert torch.equal(method._rows[f"{UP}.weight"].scale, expected)  # type: ignore[attr-defined]

    @pytest.mark.parametrize(("modules", "units"), [(["up"], ["heads"]), (["q"], [])])
    def test_a_mask_that_reaches_no_trained_row_is_refused(self, modules: list[str], units: list[str]) -> None:
        method = finetune.method("cofitune", layers="0", modules=modules, apply_to=units)
        with pytest.raises(ConfigError, match="no units"):
            method.attach(tiny_llama(), calibration=[{"input_ids": ROWS, "labels": ROWS}])

    def test_files_of_other_models_and_no_files_are_refused(self, tmp_path: Path) -> None:
        def attach(path: str) -> None:
            finetune.method("cofitune", layers="0", modules=["up"], importance=[path]).attach(tiny_llama())

        with pytest.raises(ConfigError, match="another model") as caught:
            attach(of_up(tmp_path, torch.ones(47)))
        assert "48 units" in str(caught.value)
        with pytest.raises(ConfigError, match="finite"):
            attach(of_up(tmp_path, torch.full((48,), torch.nan)))
        with pytest.raises(ConfigError, match="cannot be read"):
            attach(str(tmp_path / "absent.safetensors"))


def _slope(model: Any, gate: Gate, unit: int, rows: Tensor, epsilon: float = 1e-5) -> float:
    """Returns the derivative of the loss in one gate, by central differences in float64."""
    span = slice(gate.first + unit * gate.width, gate.first + (unit + 1) * gate.width)

    def loss(factor: float) -> float:
        def scaled(features: Tensor) -> Tensor:
            changed = features.clone()
            changed[..., span] *= factor
            return changed

        layer: nn.Module = model.get_submodule(gate.layer)
        if gate.on_input:
            handle = layer.register_forward_pre_hook(lambda module, args: (scaled(args[0]),))
        else:
            handle = layer.register_forward_hook(lambda module, args, output: scaled(output))
        with torch.no_grad():
            logits = model(input_ids=rows).logits  # the model's own loss is float32
        value = nn.functional.cross_entropy(logits[0, :-1].double(), rows[0, 1:]).item()
        handle.remove()
        return float(value)

    return (loss(1 + epsilon) - loss(1 - epsilon)) / (2 * epsilon)


SCRIPT = """
import torch
import finetune
from support.distributed import own_rows, save_results, shard, whole_parameters
from support.tiny import tiny_gpt2, tiny_llama, tiny_phi3, token_batch

rows = token_batch(4, 10)
batches = [{"input_ids": rows, "labels": rows}]
results = {}
# A feed-forward width that two processes cannot share evenly.
CASES = {
    "odd": (lambda: tiny_llama(intermediate_size=47), {"layers": "0-1", "modules": ["q", "up", "down"]}),
    "bfloat16": (lambda: tiny_llama(dtype=torch.bfloat16), {"layers": "0-1"}),
    "fused": (tiny_phi3, {"layers": "0-1", "modules": ["k", "up"]}),
    "conv1d": (tiny_gpt2, {"layers": "0-1", "modules": ["v", "down"]}),
    "tied rows": (tiny_llama, {"train": ["model.embed_tokens.weight[150:200]", "model.norm.weight[:5]"]}),
}
for case, (build, settings) in CASES.items():
    method = finetune.method("freeze" if "train" in settings else "cofitune", **settings)
    model = method.attach(build(), calibration=batches)
    shard(model, model.transformer.h if build is tiny_gpt2 else model.model.layers)
    # Not Adam, which turns the rounding of small gradients into steps.
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(6):
        mine = own_rows(step)
        model(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:  # a state goes back to where it came from
            state = {key: tensor.clone() for key, tensor in method.state_dict().items()}
            method.load_state_dict(state)
            assert all(torch.equal(tensor, state[key]) for key, tensor in method.state_dict().items())
    results[case] = (method.state_dict(), whole_parameters(model))
save_results(results)
"""


@pytest.mark.multi_process
@pytest.mark.integration
def test_two_sharded_processes_equal_one(tmp_path: Path) -> None:
    one, two = one_and_two_processes(tmp_path, SCRIPT)
    for case, (state, weights) in one.items():
        found, found_weights = two[case]
        assert state.keys() == found.keys(), case
        tolerance = 4e-3 if case == "bfloat16" else 1e-6
        for key, tensor in {**state, **weights}.items():
            other = {**found, **found_weights}[key]
            assert torch.allclose(other.float(), tensor.float(), atol=tolerance, rtol=1e-5), (case, key)
