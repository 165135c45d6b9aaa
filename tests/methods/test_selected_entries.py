"""Masks of entries: gradients against dense autograd, choices against sorting, and what must not move."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import finetune
from finetune.core.errors import CapabilityError, CheckpointError, ConfigError, DataError, TargetError
from finetune.methods import build_method, discover
from finetune.methods.calibrated_entries import CalibratedEntries
from finetune.methods.primitives.entry_choice import (
    TopEntries,
    even_quotas,
    offsets_of,
    random_entries,
    top_of,
    top_overall,
)
from finetune.methods.primitives.entry_gradient import BACKENDS, EntryPattern, fastest_backend
from finetune.methods.primitives.regrowing import RegrowingRule
from finetune.methods.selected_entries import SelectedEntries
from support.steps import adamw, take_steps
from support.tiny import tiny_gpt2, tiny_llama, tiny_mixtral, tiny_qwen, token_batch

MASKS = [name for name in discover() if issubclass(discover().get(name), SelectedEntries)]
IDS = token_batch(3, 11)
BATCH = {"input_ids": IDS, "labels": IDS}


def dense_gradients(model: Any, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the summed gradients of every parameter by plain autograd."""
    model = copy.deepcopy(model).requires_grad_(True)
    for ids in batches:
        model(input_ids=ids, labels=ids).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def chosen(method: Any) -> dict[str, list[int]]:
    return {name: entries.index.tolist() for name, entries in method._pool.tensors.items()}


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize(("tokens", "rows", "columns", "entries"), [(20, 7, 12, 30), (130, 64, 96, 5000), (5, 3, 4, 1)])
def test_every_backend_equals_the_dense_gradient(
    backend: str, tokens: int, rows: int, columns: int, entries: int
) -> None:
    torch.manual_seed(0)
    grad, x = torch.randn(tokens, rows), torch.randn(tokens, columns)
    index = torch.randperm(rows * columns)[:entries].sort().values
    expected = (grad.double().t() @ x.double()).reshape(-1)[index]
    found = BACKENDS[backend](grad, x, EntryPattern(index.int(), rows, columns))
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_the_measurement_names_a_backend_that_can_do_it() -> None:
    cpu = torch.device("cpu")
    assert fastest_backend(64, 96, 32, torch.float32, cpu) in BACKENDS
    assert fastest_backend(64, 96, 32, torch.bfloat16, cpu) in {"dense", "gather"}
    assert fastest_backend(64, 96, 32, torch.bfloat16, torch.device("cuda")) == "dense"


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize(
    ("build", "include"),
    [
        (tiny_llama, None),
        (tiny_gpt2, None),
        (tiny_mixtral, None),
        (tiny_llama, ["."]),  # embeddings that are the head too, norms
        (tiny_gpt2, ["."]),  # biases, position embeddings
        (tiny_qwen, ["."]),  # biases of nn.Linear
        (tiny_mixtral, ["experts"]),
        (tiny_llama, ["lm_head|embed"]),
    ],
)
def test_gradients_of_all_kinds_of_parameters_equal_dense_autograd(build: Any, include: Any, backend: str) -> None:
    model = build()
    expected = dense_gradients(model, [IDS, IDS[:2]])
    method = finetune.method("random", budget=0.05, scope={"include": include}, backend=backend)
    method.attach(model)
    for ids in (IDS, IDS[:2]):
        model(input_ids=ids, labels=ids).loss.backward()
    gradient = method._pool.values.grad
    for name, entries in method._pool.tensors.items():
        want = expected[name].reshape(-1)[entries.index]
        torch.testing.assert_close(gradient[entries.slot], want, atol=1e-5, rtol=1e-4)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_the_default_scope_is_every_matrix_but_embeddings_and_head() -> None:
    for build in (tiny_llama, tiny_gpt2, tiny_mixtral):
        model = build()
        method = finetune.method("magnitude")
        method.attach(model)
        kinds = (nn.Embedding,)
        outside = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
        outside.add(id(model.get_output_embeddings()._parameters["weight"]))
        expected = {name for name, p in model.named_parameters() if p.ndim > 1 and id(p) not in outside}
        assert method.touched() == expected
        size = sum(model.get_parameter(name).numel() for name in expected)
        assert method.summary().trained == round(0.01 * size)


def test_a_shared_tensor_is_in_the_scope_once() -> None:
    method = finetune.method("pafi", scope={"include": ["embed_tokens|lm_head"]}, budget=64)
    method.attach(tiny_llama(tied=True))
    assert list(method.touched()) == ["model.embed_tokens.weight"]
    method = finetune.method("pafi", scope={"include": ["embed_tokens|lm_head"]}, budget=64)
    method.attach(tiny_llama(tied=False))
    assert len(method.touched()) == 2


def test_frozen_unused_and_zero_dimensional_parameters_do_no_harm() -> None:
    model = tiny_llama()
    model.model.layers[0].unused = nn.Linear(8, 8)
    model.model.layers[0].scale = nn.Parameter(torch.tensor(2.0))
    method = finetune.method("random", budget=0.5, scope={"include": ["layers.0"]})
    method.attach(model)
    assert "model.layers.0.scale" in method.touched()
    before = {name: p.clone() for name, p in model.named_parameters()}
    take_steps(model, adamw(method), range(3))
    assert torch.equal(model.model.layers[0].unused.weight, before["model.layers.0.unused.weight"])


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("fused", [False, True])
def test_what_is_not_chosen_stays_bit_identical_in_bfloat16(name: str, fused: bool) -> None:
    before = tiny_llama(dtype=torch.bfloat16)
    model = copy.deepcopy(before)
    method = finetune.method(name, budget=200, **({"every": 100} if name == "spiel" else {}))
    method.attach(model, calibration=[BATCH])
    method.bind(total_steps=10)
    take_steps(model, adamw(method, weight_decay=0.1, fused=fused), range(20))
    assert method._pool.chosen == 200
    changed = 0
    for parameter_name, parameter in before.named_parameters():
        entries = method._pool.tensors.get(parameter_name)
        differs = (model.get_parameter(parameter_name) != parameter).reshape(-1)
        if entries is not None:
            written = model.get_parameter(parameter_name).detach().reshape(-1)[entries.index]
            assert torch.equal(written, method._pool.absolute(entries).bfloat16())
            changed += int(differs.sum())
            differs[entries.index] = False
        assert not differs.any(), parameter_name
    assert changed > 150


@pytest.mark.parametrize("target", ["zero", "base"])
def test_weight_decay_pulls_to_its_target(target: str) -> None:
    model = tiny_llama()
    before = copy.deepcopy(model)
    method = finetune.method("random", budget=100, weight_decay_target=target)
    method.attach(model)
    optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-1, weight_decay=1.0)
    take_steps(model, adamw(method, weight_decay=0.1), range(3))
    moved = method._pool.values.detach().clone()
    for _ in range(300):
        method._pool.values.grad = torch.zeros_like(moved)
        optimizer.step()
    for name, entries in method._pool.tensors.items():
        now = model.get_parameter(name).detach().reshape(-1)[entries.index]
        base = before.get_parameter(name).detach().reshape(-1)[entries.index]
        torch.testing.assert_close(now, base if target == "base" else torch.zeros_like(base), atol=1e-6, rtol=0)


def test_random_choices_are_exact_distinct_and_uniform() -> None:
    sizes = {"a": 7, "b": 1, "c": 12}
    hits = torch.zeros(20)
    rounds = 4000
    generator = torch.Generator().manual_seed(0)
    for _ in range(rounds):
        drawn = random_entries(sizes, 5, generator)
        flat = [offsets_of(sizes)[name] + index for name in sizes for index in drawn[name].tolist()]
        assert len(set(flat)) == 5
        hits[flat] += 1
    # Binomial with p = 1/4: six standard deviations.
    assert (hits / rounds - 0.25).abs().max() < 6 * math.sqrt(0.25 * 0.75 / rounds)
    dense = random_entries(sizes, 19, generator)
    assert sum(index.numel() for index in dense.values()) == 19
    assert sum(index.numel() for index in random_entries(sizes, 20, generator).values()) == 20


def test_streamed_top_entries_equal_a_stable_sort_with_many_ties() -> None:
    torch.manual_seed(0)
    scores = {name: torch.randint(0, 6, (size,)).float() for name, size in (("a", 50), ("b", 3), ("c", 200))}
    sizes = {name: score.numel() for name, score in scores.items()}
    order = torch.cat(list(scores.values())).sort(descending=True, stable=True).indices
    for count, names in itertools.product((0, 1, 9, 60, 253), itertools.permutations(scores)):
        top = TopEntries(offsets_of(sizes), count)
        for name in names:
            top.add(name, scores[name], scores[name])
        found = [offsets_of(sizes)[name] + i for name, (index, _) in top.result()[0].items() for i in index.tolist()]
        assert sorted(found) == sorted(order[:count].tolist()), (count, names)
    assert top_of(torch.tensor([1.0, 2.0, 2.0, 2.0]), 2).tolist() == [1, 2]


def test_quotas_are_proportional_and_add_up() -> None:
    assert even_quotas({"a": 10, "b": 30, "c": 60}, 10) == {"a": 1, "b": 3, "c": 6}
    for total in range(30):
        quotas = even_quotas({"a": 7, "b": 11, "c": 13}, total)
        assert sum(quotas.values()) == total
        assert all(abs(quotas[name] - total * size / 31) < 1 for name, size in (("a", 7), ("b", 11), ("c", 13)))


def test_magnitude_takes_the_largest_of_each_tensor_and_pafi_the_smallest_of_all() -> None:
    model = tiny_llama()
    method = finetune.method("magnitude", budget=0.1)
    method.attach(copy.deepcopy(model))
    for name, index in chosen(method).items():
        sizes = model.get_parameter(name).detach().abs().reshape(-1)
        others = torch.ones_like(sizes, dtype=torch.bool)
        others[index] = False
        assert sizes[index].min() >= sizes[others].max()
        assert abs(len(index) - 0.1 * sizes.numel()) < 1
    method = finetune.method("pafi", budget=333)
    method.attach(copy.deepcopy(model))
    every = torch.cat([model.get_parameter(name).detach().abs().reshape(-1) for name in method._pool.tensors])
    picked = torch.cat([entries.base.abs() for entries in method._pool.tensors.values()])
    assert picked.numel() == 333
    assert picked.max() <= every.kthvalue(333).values


@pytest.mark.parametrize("passes", [1, 3])
def test_masks_by_gradient_equal_their_definitions(passes: int) -> None:
    model = tiny_llama()
    batches = [token_batch(2, 8, seed=seed) for seed in range(3)]
    calibration = [{"input_ids": ids, "labels": ids} for ids in batches]
    gradients = dense_gradients(model, batches)
    rows = [ids[row : row + 1] for ids in batches for row in range(2)]
    single = [dense_gradients(model, [row]) for row in rows]
    names = None
    scores = {
        "fish": lambda name: sum(gradient[name].double() ** 2 for gradient in single),
        "snip": lambda name: (gradients[name] * model.get_parameter(name)).abs().detach(),
        "sift": lambda name: gradients[name].abs(),
    }
    for method_name, score in scores.items():
        method = finetune.method(method_name, budget=150, passes=passes)
        attached = method.attach(copy.deepcopy(model), calibration=calibration)
        names = list(method._pool.tensors)
        assert [n for n, p in attached.named_parameters() if p.requires_grad] == ["selected_entries"]
        by_name = {name: score(name).float().reshape(-1) for name in names}
        sizes = {name: value.numel() for name, value in by_name.items()}
        if method_name == "sift":
            quotas = even_quotas(sizes, 150)
            expected = {name: value.topk(quotas[name]).indices for name, value in by_name.items()}
        else:
            expected = top_overall(by_name.items(), sizes, 150)
        for name in names:
            assert chosen(method)[name] == sorted(expected.get(name, torch.tensor([])).tolist()), (method_name, name)


def test_padding_of_an_example_changes_nothing_for_fish() -> None:
    model = tiny_llama()
    short, long = IDS[:1, :6], IDS[1:2]
    padded = {
        "input_ids": torch.cat([torch.cat([short, torch.full((1, 5), 2)], 1), long]),
        "labels": torch.cat([torch.cat([short, torch.full((1, 5), -100)], 1), long]),
        "attention_mask": torch.tensor([[1] * 6 + [0] * 5, [1] * 11]),
    }
    apart = [{"input_ids": short, "labels": short}, {"input_ids": long, "labels": long}]
    choices = []
    for calibration in ([padded], apart):
        method = finetune.method("fish", budget=100)
        method.attach(copy.deepcopy(model), calibration=calibration)
        choices.append(chosen(method))
    assert choices[0] == choices[1]


def test_spiel_exchanges_what_changed_least_for_the_largest_gradients() -> None:
    model = tiny_llama()
    base = copy.deepcopy(model)
    method = finetune.method("spiel", budget=1400, every=6, gradient_steps=3, rate=0.5)
    method.attach(model)
    method.bind(total_steps=24)
    replace, exchanged = method._pool.replace, []

    def watched(entries: Any, dropped: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        change = (method._pool.absolute(entries) - entries.base).abs()
        kept = torch.ones_like(change, dtype=torch.bool)
        kept[dropped] = False
        exchanged.append(len(dropped))
        assert not kept.any() or not len(dropped) or change[dropped].max() <= change[kept].min()
        return replace(entries, dropped, index)

    method._pool.replace = watched
    optimizer = adamw(method)
    for step in range(24):
        ids = token_batch(2, 9, seed=step)
        if step % 6 == 3:
            sums = {name: torch.zeros_like(p).reshape(-1) for name, p in base.named_parameters()}
            squares = copy.deepcopy(sums)
            proposed: dict[str, torch.Tensor] = {}
        if step % 6 >= 3:
            plain = copy.deepcopy(base)
            plain.load_state_dict(model.state_dict())
            for name, gradient in dense_gradients(plain, [ids]).items():
                sums[name] += gradient.reshape(-1)
                squares[name] += gradient.reshape(-1) ** 2
                if step % 6 == 3 and name in method.touched():
                    size = gradient.abs().reshape(-1).clone()
                    size[method._pool.tensors[name].index] = -1
                    proposed[name] = size.topk(method._pool.tensors[name].index.numel()).indices
        before = {name: set(entries.index.tolist()) for name, entries in method._pool.tensors.items()}
        take_steps(model, optimizer, [step])
        exchange = step + 1 in (6, 12, 18)
        share = 1.0 if step + 1 == 6 else 0.5 * (1 - (step + 1) / 24)
        state = optimizer.state[method._pool.values]
        for name, entries in method._pool.tensors.items():
            now = set(entries.index.tolist())
            assert len(now) == len(before[name])
            new = now - before[name]
            assert len(new) == (round(share * len(now)) if exchange else 0)
            if not exchange:
                continue
            best = proposed[name][sums[name][proposed[name]].abs().topk(len(new)).indices].tolist()
            assert new == set(best)
            for index, slot in zip(entries.index.tolist(), entries.slot.tolist(), strict=True):
                if index in new:
                    flat = base.get_parameter(name).detach().reshape(-1)
                    assert method._pool.values[slot] == flat[index]
                    torch.testing.assert_close(
                        state["exp_avg"][slot], (1 - 0.9**3) * sums[name][index] / 3, atol=1e-6, rtol=1e-4
                    )
                    torch.testing.assert_close(
                        state["exp_avg_sq"][slot], (1 - 0.999**3) * squares[name][index] / 3, atol=1e-9, rtol=1e-4
                    )
            gone = torch.tensor(sorted(before[name] - now))
            assert torch.equal(
                model.get_parameter(name).detach().reshape(-1)[gone],
                base.get_parameter(name).detach().reshape(-1)[gone],
            )
    assert len(exchanged) == 3 * len(method.touched())


def test_the_rate_of_exchange_falls_to_zero() -> None:
    rule = RegrowingRule(every=20, gradient_steps=5, rate=0.2)
    assert [rule.share(step, 100) for step in (0, 19, 20, 40, 60, 80, 100)] == pytest.approx(
        [0, 0, 1, 0.12, 0.08, 0.04, 0]
    )
    assert [step for step in range(45) if rule.gathers(step, 100)] == [15, 16, 17, 18, 19, 35, 36, 37, 38, 39]
    assert not any(rule.gathers(step, 100) for step in range(80, 100))


def test_methods_that_choose_by_data_ask_for_it() -> None:
    for name in MASKS:
        if issubclass(discover().get(name), CalibratedEntries):
            with pytest.raises(CapabilityError, match="chooses what trains by data") as caught:
                finetune.method(name).attach(tiny_llama())
            assert "calibration=" in caught.value.fix
    unlabelled = {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}
    with pytest.raises(DataError, match="calibration batch"):
        finetune.method("sift").attach(tiny_llama(), calibration=[unlabelled])


def test_wrong_budgets_and_scopes_are_named() -> None:
    for budget in (0, -1, 0.0, 1.5):
        with pytest.raises(ConfigError):
            finetune.method("random", budget=budget)
    with pytest.raises(TargetError, match="larger than the scope") as caught:
        finetune.method("random", budget=10**9).attach(tiny_llama())
    assert caught.value.where == "method.budget"
    with pytest.raises(TargetError, match="'down_prj' matches no parameter") as caught:
        finetune.method("random", scope={"include": ["down_prj"]}).attach(tiny_llama())
    assert caught.value.near == "down_proj"
    with pytest.raises(TargetError, match="scope holds no parameter"):
        finetune.method("random", scope={"include": ["down_proj"], "exclude": ["mlp"]}).attach(tiny_llama())
    with pytest.raises(ConfigError, match="regular expression"):
        finetune.method("random", scope={"include": ["("]}).attach(tiny_llama())


def test_quantised_weights_are_refused() -> None:
    model = tiny_llama()
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(TargetError, match="quantised") as caught:
        finetune.method("random").attach(model)
    assert caught.value.where == "model.layers.0.mlp.up_proj.weight"


def test_a_stock_state_dict_neither_shows_nor_needs_the_entries() -> None:
    model = tiny_llama()
    keys = list(model.state_dict())
    method = finetune.method("random", budget=50)
    method.attach(model)
    assert list(model.state_dict()) == keys
    other = tiny_llama(seed=5)
    model.load_state_dict(other.state_dict())
    for name, entries in method._pool.tensors.items():
        expected = other.get_parameter(name).detach().reshape(-1)[entries.index]
        assert torch.equal(method._pool.values.detach()[entries.slot], expected)


def test_a_state_that_belongs_to_another_base_changes_nothing() -> None:
    method, other = finetune.method("random", budget=50), finetune.method("random", budget=50)
    method.attach(tiny_llama(seed=0))
    model = other.attach(tiny_llama(seed=1))
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(CheckpointError, match="another base"):
        other.load_state_dict(method.state_dict())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_reading_a_weight_outside_the_forward_pass_is_harmless_and_trains_it_where_it_is_used() -> None:
    model = tiny_llama()
    method = finetune.method("random", budget=0.1)
    method.attach(model)
    layer = model.model.layers[0].mlp.up_proj
    assert isinstance(layer.weight, nn.Parameter)
    (layer.weight.sum() * 2).backward()
    entries = method._pool.tensors["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(method._pool.values.grad[entries.slot], torch.full((entries.slot.numel(),), 2.0))
    assert int((method._pool.values.grad != 0).sum()) == entries.slot.numel()


def test_two_forward_passes_and_one_backward_each() -> None:
    model = tiny_llama()
    method = finetune.method("random", budget=100)
    method.attach(model)
    losses = [model(input_ids=ids, labels=ids).loss for ids in (IDS[:1], IDS[1:])]
    for loss in losses:
        loss.backward()
    apart = method._pool.values.grad.clone()
    model.zero_grad()
    sum(model(input_ids=ids, labels=ids).loss for ids in (IDS[:1], IDS[1:])).backward()
    torch.testing.assert_close(method._pool.values.grad, apart, atol=1e-6, rtol=1e-5)


def test_writing_between_forward_and_backward_raises_instead_of_a_wrong_gradient() -> None:
    for build in (tiny_llama, tiny_gpt2):
        model = build()
        method = finetune.method("random", budget=0.1)
        method.attach(model)
        loss = model(**BATCH).loss
        method._pool.write()
        with pytest.raises(RuntimeError, match=r"in-?place"):
            loss.backward()


def test_no_gradient_flows_below_the_first_layer_with_entries() -> None:
    model = tiny_llama(layers=4)
    method = finetune.method("random", budget=0.1, scope={"include": [r"layers\.3\."]})
    method.attach(model)
    flowed = []
    for layer in model.model.layers:
        layer.register_full_backward_hook(lambda module, grads, outs: flowed.append(module))
    model(**BATCH).loss.backward()
    assert flowed == [model.model.layers[3]]


def test_a_composition_that_chose_by_data_loads_without_it(tmp_path: Path) -> None:
    spec = [{"name": "lora", "r": 4, "target_modules": "all-linear"}, {"name": "snip", "budget": 60}]
    torch.manual_seed(0)
    method = build_method(spec)
    model = method.attach(tiny_llama(), calibration=[BATCH])
    take_steps(model, adamw(method), range(2))
    method.save(tmp_path)
    again = build_method(spec)
    fresh = again.attach(tiny_llama(), learned=tmp_path)
    assert torch.equal(fresh(IDS).logits, model(IDS).logits)
