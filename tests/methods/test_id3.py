"""ID3 against a dense masked oracle, and its schedule and scores against numbers worked by hand."""

from __future__ import annotations

import copy
import itertools
import statistics
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import GradientState

import finetune
from finetune.core.errors import TrainingError
from finetune.methods import build_method
from finetune.methods.primitives import unmasking
from finetune.methods.primitives.entry_choice import TopEntries, offsets_of
from finetune.methods.primitives.gradient_block import GradientBlock, block_in_reach, columns_in_reach
from finetune.methods.primitives.unmasking import UnmaskingRule, unmasked_by
from support.processes import one_and_two_processes
from support.steps import adamw, take_steps
from support.tiny import tiny_gpt2, tiny_llama, token_batch

STEPS = 12


def rule(epsilon: float, exponent: float) -> UnmaskingRule:
    return UnmaskingRule(exponent, epsilon, "uniform", 1, "exact")


@pytest.mark.parametrize(
    ("schedule", "budget", "steps", "quotas"),
    [
        ("uniform", 7, 3, [2, 2, 3]),
        ("frontload", 7, 3, [3, 2, 2]),
        ("uniform", 2, 5, [0, 0, 1, 0, 1]),
        ("frontload", 2, 5, [1, 1, 0, 0, 0]),
    ],
)
def test_schedules_of_the_spec(schedule: str, budget: int, steps: int, quotas: list[int]) -> None:
    reached = [unmasked_by(step, budget=budget, steps=steps, schedule=schedule) for step in range(steps + 3)]
    assert [after - before for before, after in itertools.pairwise(reached)] == [*quotas, 0, 0]


def test_updates_of_the_spec() -> None:
    """B = 6 over 3 steps: 2 + 4 + 6 updates, where a static mask makes 18."""
    assert sum(unmasked_by(step, budget=6, steps=3, schedule="uniform") for step in (1, 2, 3)) == 12


@pytest.mark.parametrize(
    ("exponent", "expected"),
    [
        (0.0, (0.3, 0.1, 0.05, 0.6)),
        (1.0, (0.5, 0.8333, 0.5, 0.375)),
        (2.0, (0.8333, 6.9444, 5.0, 0.2344)),
        (-1.0, (0.18, 0.012, 0.005, 0.96)),
    ],
)
def test_scores_of_the_spec(exponent: float, expected: tuple[float, ...]) -> None:
    weight = torch.tensor([0.5, -0.02, 0.0, 1.5])
    gradient = torch.tensor([0.3, -0.1, 0.05, 0.6])
    score = rule(0.1, exponent).score(gradient, weight)
    torch.testing.assert_close(score, torch.tensor(expected), atol=5e-5, rtol=1e-4)


def test_ties_go_to_the_lower_index_as_in_the_spec() -> None:
    weight, gradient = torch.tensor([1.5, -0.5, 0.0, 3.5]), torch.tensor([1.0, -0.5, 0.25, 3.0])
    score = rule(0.5, 1.0).score(gradient, weight)
    assert score.tolist() == [0.5, 0.5, 0.5, 0.75]
    top = TopEntries(offsets_of({"w": 4}), 2)
    top.add("w", score, gradient)
    chosen, _ = top.result()
    assert chosen["w"][0].tolist() == [0, 3]


class DenseOracle:
    """The same rule with dense gradients, masks and Adam moments, in float64; decay moves unmasked entries only."""

    def __init__(self, model: Any, names: list[str], *, budget: int, steps: int, per_entry: bool, **options: float):
        self.weights = {name: model.get_parameter(name) for name in names}
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for weight in self.weights.values():
            weight.requires_grad_(True)
        sizes = [weight.numel() for weight in self.weights.values()]
        self.master = self._flat(self.weights.values()).double()
        self.mask = torch.zeros(sum(sizes), dtype=torch.bool)
        self.since = torch.zeros(sum(sizes))
        self.first, self.second = torch.zeros(sum(sizes)).double(), torch.zeros(sum(sizes)).double()
        self.step, self.budget, self.steps, self.per_entry, self.options = 0, budget, steps, per_entry, options

    @staticmethod
    def _flat(tensors: Any) -> torch.Tensor:
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    def take_step(self, *, lr: float, clip: float | None, decay: float) -> None:
        gradient = self._flat(weight.grad for weight in self.weights.values())
        for weight in self.weights.values():
            weight.grad = None
        quota = unmasked_by(self.step + 1, budget=self.budget, steps=self.steps, schedule="uniform") - int(
            self.mask.sum()
        )
        score = gradient.abs() / (self._flat(self.weights.values()).abs() + 0.1)
        score[self.mask] = -1
        new = score.sort(descending=True, stable=True).indices[:quota]
        self.mask[new] = True
        self.since[new] = self.step
        self.step += 1
        g = torch.where(self.mask, gradient, 0).double()
        if clip is not None and g.norm() > clip:
            g *= clip / (g.norm() + 1e-6)
        self.first = 0.9 * self.first + 0.1 * g
        self.second = 0.999 * self.second + 0.001 * g * g
        age = (self.step - self.since if self.per_entry else torch.full_like(self.since, self.step)).double()
        update = self.first / (1 - 0.9**age) / ((self.second / (1 - 0.999**age)).sqrt() + 1e-8)
        moved = self.master * (1 - lr * decay) - lr * update
        self.master = torch.where(self.mask, moved, self.master)
        start = 0
        for weight in self.weights.values():
            with torch.no_grad():
                weight.copy_(self.master[start : start + weight.numel()].view_as(weight))
            start += weight.numel()


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize(("clip", "decay"), [(None, 0.0), (0.05, 0.0), (0.05, 0.1)])
@pytest.mark.parametrize("state", ["global", "per_entry"])
@pytest.mark.parametrize(("cuts", "backend"), [(1, "dense"), (1, "sampled"), (3, "gather")])
def test_equals_the_dense_masked_oracle(
    build: Any, clip: float | None, decay: float, state: str, cuts: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = recorded_blocks(monkeypatch)
    base, budget = build(), 101
    uneven_channels(base)
    model = copy.deepcopy(base)
    method = finetune.method("id3", budget=budget, state=state, accumulation="exact", backend=backend)
    method.attach(model)
    method.bind(total_steps=8)  # fewer than are taken
    names = [name for name, _ in base.named_parameters() if name in method.touched()]
    oracle = DenseOracle(base, names, budget=budget, steps=8, per_entry=state == "per_entry")
    optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2, weight_decay=decay, fused=True)
    for step in range(STEPS):
        rows = token_batch(6, 9, seed=step).chunk(cuts)
        for network in (model, base):
            for part in rows:
                GradientState()._set_sync_gradients(part is rows[-1])
                (network(input_ids=part, labels=part).loss / cuts).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        oracle.take_step(lr=1e-2, clip=clip, decay=decay)
        chosen = {name: entries.index.tolist() for name, entries in method._pool.tensors.items()}
        start = 0
        for name, weight in oracle.weights.items():
            mask = oracle.mask[start : start + weight.numel()]
            assert mask.nonzero().reshape(-1).tolist() == chosen[name], (step, name)
            start += weight.numel()
            torch.testing.assert_close(model.get_parameter(name).detach(), weight.detach(), atol=3e-6, rtol=1e-5)
    assert int(oracle.mask.sum()) == budget
    if build is tiny_llama and backend == "sampled":
        # All but the first of 14 tensors at each of 8 steps.
        assert len(blocks) == 8 * 13
        assert statistics.mean(block.share < 0.5 for block in blocks) > 0.3
    else:
        assert not blocks


def uneven_channels(model: Any) -> None:
    """Makes few channels carry most of the activations, as in trained models."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "bias" not in name:
                parameter.copy_(2 * torch.rand(parameter.shape, generator=generator) ** 4)


def recorded_blocks(monkeypatch: pytest.MonkeyPatch) -> list[GradientBlock]:
    """Returns a list that fills with the blocks of gradients that are computed."""
    blocks: list[GradientBlock] = []

    def recorded(*arguments: torch.Tensor) -> GradientBlock:
        blocks.append(block_in_reach(*arguments))
        return blocks[-1]

    monkeypatch.setattr(unmasking, "block_in_reach", recorded)
    return blocks


@pytest.mark.parametrize("tokens", [1, 20])  # of one token, the norms multiplied are the entries
def test_a_block_holds_all_that_reaches_and_knows_its_places(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(tokens, 30, generator=generator) * torch.rand(30, generator=generator) ** 4
    x = torch.randn(tokens, 40, generator=generator) * torch.rand(40, generator=generator) ** 4
    dense = grad.t() @ x
    least = dense.abs().quantile(0.99)
    block = block_in_reach(grad, x, least)
    assert 0.01 < block.share < 0.6
    inside = torch.zeros(30 * 40, dtype=torch.bool)
    inside[block.positions()] = True
    assert (dense.abs().reshape(-1)[~inside] < least).all()
    torch.testing.assert_close(block.product(grad, x), dense.reshape(-1)[inside])
    assert torch.equal(block.of(dense), dense.reshape(-1)[inside])
    index = torch.randperm(30 * 40, generator=generator)[:300].sort().values
    places = block.places(index.int())
    assert block.positions()[places].tolist() == index[inside[index]].tolist()


@pytest.mark.parametrize("shape", [(30, 64), (7, 11)])  # one that divides into rows, and what does not divide into them
def test_the_columns_in_reach_hold_all_that_reaches(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 4
    dense[2, 3] = torch.nan
    flat = dense.reshape(-1)
    block = columns_in_reach(flat, dense.nan_to_num().abs().quantile(0.99))
    assert 0.0 < block.share < 0.8
    inside = torch.zeros(flat.numel(), dtype=torch.bool)
    inside[block.positions()] = True
    assert inside[2 * shape[1] + 3]
    assert (flat.abs()[~inside] < dense.nan_to_num().abs().quantile(0.99)).all()
    torch.testing.assert_close(block.of(flat), flat[inside], equal_nan=True)
    index = torch.randperm(flat.numel(), generator=generator)[:50].sort().values
    assert block.positions()[block.places(index)].tolist() == index[inside[index]].tolist()


def test_a_block_holds_what_is_not_finite() -> None:
    grad, x = torch.ones(3, 4), torch.ones(3, 5)
    grad[1, 2], x[0, 3] = torch.nan, torch.inf
    block = block_in_reach(grad, x, torch.tensor(1e9))
    assert block.product(grad, x).isnan().any()
    assert set(block.positions().tolist()) >= {2 * 5 + column for column in range(5)} | {
        row * 5 + 3 for row in range(4)
    }


@pytest.mark.parametrize(("budget", "total", "every"), [(30, 5, 1), (3, 10, 1), (40, 7, 3), (17, 4, 20)])
def test_the_budget_is_met_exactly_and_the_rest_stays_bit_identical_in_bfloat16(
    budget: int, total: int, every: int
) -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    before = copy.deepcopy(model)
    method = finetune.method("id3", budget=budget, select_every=every)
    method.attach(model)
    method.bind(total_steps=total)
    optimizer = adamw(method, weight_decay=0.1)
    counts = []
    for step in range(20):
        take_steps(model, optimizer, [step])
        counts.append(method._pool.chosen)
        assert all(p.grad is None for name, p in model.named_parameters() if name != "selected_entries")
    reached = [min(total, step - step % every + every) if step < total else total for step in range(20)]
    assert counts == [budget * step // total for step in reached]
    assert counts[-1] == budget
    changed = 0
    for name, parameter in before.named_parameters():
        differs = (model.get_parameter(name) != parameter).reshape(-1).nonzero().reshape(-1).tolist()
        chosen = method._pool.tensors[name].index.tolist() if name in method.touched() else []
        assert set(differs) <= set(chosen), name
        changed += len(differs)
    assert changed > budget / 2


def test_equal_scores_take_the_first_entries_and_exactly_so_many() -> None:
    model = tiny_llama(layers=1)
    method = finetune.method("id3", budget=10, exp=0.0, scope={"include": ["q_proj", "down_proj"]})
    method.attach(model)
    method.bind(total_steps=2)
    entries = method._pool.tensors
    gradient = torch.zeros_like(method._pool.values)
    assert method._schedule.begin_pass()
    for name in reversed(entries):  # as a backward pass meets them
        method._schedule.observe(entries[name], torch.ones(entries[name].weight.numel()))
    method._schedule.end_pass(gradient)
    first, second = entries
    assert entries[first].index.tolist() == [0, 1, 2, 3, 4]
    assert entries[second].index.numel() == 0
    assert gradient.tolist() == [1.0] * 5 + [0.0] * 5


def test_one_dense_gradient_is_alive_at_a_time_and_none_where_nothing_is_unmasked() -> None:
    model = tiny_llama(layers=3)
    method = finetune.method("id3", budget=30, select_every=2)
    method.attach(model)
    method.bind(total_steps=4)
    seen: list[weakref.ref[torch.Tensor]] = []
    observe = method._schedule.observe

    def watched(entries: Any, gradient: torch.Tensor) -> None:
        assert all(reference() is None for reference in seen)
        seen.append(weakref.ref(gradient))
        observe(entries, gradient)

    method._schedule.observe = watched
    optimizer = adamw(method)
    counts = []
    for step in range(6):
        take_steps(model, optimizer, [step])
        counts.append(len(seen))
    tensors = len(method.touched())
    assert counts == [tensors, tensors, 2 * tensors, 2 * tensors, 2 * tensors, 2 * tensors]


def test_the_optimizer_holds_two_values_per_budgeted_entry() -> None:
    model = tiny_llama()
    method = finetune.method("id3", budget=50)
    method.attach(model)
    method.bind(total_steps=5)
    optimizer = torch.optim.AdamW(method.trained_parameters().values())
    ids = token_batch()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    held = [t.numel() for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    assert held == [50, 50]


def test_a_gradient_that_is_not_finite_unmasks_nothing_and_costs_no_quota() -> None:
    model = tiny_llama()
    method = finetune.method("id3", budget=40)
    method.attach(model)
    method.bind(total_steps=4)
    ids = token_batch()
    (model(input_ids=ids, labels=ids).loss * torch.inf).backward()
    assert method._pool.chosen == 0
    model.zero_grad()
    # One entry of one layer is enough.
    bad = model.model.layers[1].mlp.up_proj.register_full_backward_hook(lambda m, grads, outs: (grads[0] * torch.nan,))
    model(input_ids=ids, labels=ids).loss.backward()
    assert method._pool.chosen == 0
    bad.remove()
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    assert method._pool.chosen == 10


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_changes_nothing_and_its_skipped_step_costs_no_quota(fused: bool) -> None:
    results = []
    for scaled in (False, True):
        method = finetune.method("id3", budget=40)
        model = method.attach(tiny_llama())
        method.bind(total_steps=4)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2, fused=fused)
        counts = []
        for step in (0, 1, None, 2, 3):  # a step whose loss overflows, which is tried again with other data
            if step is None and not scaled:
                continue
            ids = token_batch(2, 9, seed=step or 0)
            loss = model(input_ids=ids, labels=ids).loss * (torch.inf if step is None else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            counts.append(method._pool.chosen)
        assert counts == ([10, 20, 20, 30, 40] if scaled else [10, 20, 30, 40])
        results.append({name: (e.index.tolist(), method._pool.absolute(e)) for name, e in method._pool.tensors.items()})
    for name, (index, value) in results[0].items():
        assert results[1][name][0] == index
        # Scaling by a power of two is exact, dividing the norm by it is not quite.
        torch.testing.assert_close(results[1][name][1], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("accumulation", ["candidates", "last"])
def test_cheap_scores_over_micro_batches_keep_the_budget_and_the_sums(accumulation: str) -> None:
    model = tiny_llama()
    method = finetune.method("id3", budget=20, accumulation=accumulation)
    method.attach(model)
    method.bind(total_steps=1)
    parts = token_batch(6, 9).chunk(3)
    for part in parts:
        GradientState()._set_sync_gradients(part is parts[-1])
        model(input_ids=part, labels=part).loss.backward()
    assert method._pool.chosen == 20
    dense = tiny_llama()
    counted = parts if accumulation == "candidates" else parts[-1:]
    for part in counted:
        dense(input_ids=part, labels=part).loss.backward()
    for name, entries in method._pool.tensors.items():
        expected = dense.get_parameter(name).grad.reshape(-1)[entries.index]
        torch.testing.assert_close(method._pool.values.grad[entries.slot], expected, atol=1e-6, rtol=1e-5)


def test_works_on_the_matrices_of_an_adapter_and_resumes(tmp_path: Path) -> None:
    spec = [{"name": "lora", "r": 4, "target_modules": "all-linear"}, {"name": "id3", "budget": 60}]

    def start(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        method = build_method(spec)
        model = method.attach(tiny_llama())
        method.bind(total_steps=6)
        return method, model, adamw(method)

    method, model, optimizer = start(0)
    assert list(method.trained_parameters()) == ["selected_entries"]
    take_steps(model, optimizer, range(3))
    method.save(tmp_path)
    moments = copy.deepcopy(optimizer.state_dict())
    take_steps(model, optimizer, range(3, 6))
    again, fresh, optimizer = start(1)
    again.load(tmp_path)
    optimizer.load_state_dict(moments)
    take_steps(fresh, optimizer, range(3, 6))
    probe = token_batch(seed=9)
    with torch.no_grad():
        expected = model(probe).logits
        assert torch.equal(fresh(probe).logits, expected)
        again.save(tmp_path)
        assert torch.equal(finetune.load(tiny_llama(), tmp_path)(probe).logits, expected)
        merged = method.merge()
        assert type(merged) is type(tiny_llama())
        torch.testing.assert_close(merged(probe).logits, expected, atol=2e-5, rtol=1e-4)


TWO_PROCESSES = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import finetune
from support.distributed import distributed, own_rows, save_results
from support.tiny import tiny_llama

sent = []
for name in ("all_reduce", "all_gather"):
    def counted(*args, real=getattr(dist, name), **kwargs):
        sent.append(args[-1].numel())
        return real(*args, **kwargs)
    setattr(dist, name, counted)
results = {}
for accumulation in ("candidates", "exact"):
    torch.manual_seed(0)
    method = finetune.method("id3", budget=80, accumulation=accumulation, select_every=2)
    model = method.attach(tiny_llama())
    method.bind(total_steps=8)
    wrapped = DistributedDataParallel(model) if distributed else model
    optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2, weight_decay=0.1)
    per_step = []
    for step in range(10):
        mine = own_rows(step)
        wrapped(input_ids=mine, labels=mine).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        per_step.append(sum(sent))
        sent.clear()
    state = method.state_dict()
    for name, tensor in (state.items() if distributed else ()):
        other = tensor.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, tensor), name
    results[accumulation] = state
    results[accumulation + "/sent"] = per_step
save_results(results)
"""


@pytest.mark.multi_process
@pytest.mark.integration
def test_two_processes_unmask_what_one_does_and_exchange_candidates_only(tmp_path: Path) -> None:
    one, two = one_and_two_processes(tmp_path, TWO_PROCESSES)
    for accumulation in ("candidates", "exact"):
        assert one[accumulation].keys() == two[accumulation].keys()
        for name, tensor in one[accumulation].items():
            if name != "training/backends":  # each process may compute in its own way
                torch.testing.assert_close(two[accumulation][name], tensor, atol=1e-6, rtol=1e-5)
    # 20 entries at every second step: 5 x 20 candidates per tensor, their union over two processes at most twice that.
    tensors = 14
    sent = two["candidates/sent"]
    assert all(0 < number <= tensors * (100 + 200) for number in sent[0:8:2])
    assert sent[1:8:2] == [0, 0, 0, 0]
    assert sent[8:] == [0, 0]
    assert two["exact/sent"][0] == 15_360  # every entry of the scope


def test_an_unknown_length_of_the_run_and_nested_backward_passes_are_refused() -> None:
    ids = token_batch()
    model = finetune.method("id3").attach(tiny_llama())
    with pytest.raises(TrainingError, match="how many steps"):
        model(input_ids=ids, labels=ids).loss.backward()
    method = finetune.method("id3", steps=4)
    model = method.attach(tiny_llama())
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model.train()
    with pytest.raises(TrainingError, match="nested backward"):
        model(input_ids=ids, labels=ids).loss.backward()
