"""Zeroth-order methods in stock ``transformers.Trainer``, on two processes, and through ``finetune train``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import finetune
from finetune.core.errors import CapabilityError, ConfigError, TrainingError
from finetune.methods import build_method
from support.processes import one_and_two_processes, run_script
from support.tiny import tiny_llama, token_batch

NAMES = ("mezo", "lozo")
ROWS = [{"input_ids": row, "labels": row} for row in token_batch(16, 10)]


class Slopes(TrainerCallback):
    """Keeps what the optimizer is about to use."""

    def __init__(self, model: Any) -> None:
        self.model, self.slopes = model, []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.slopes.append(float(self.model.projected_gradient.grad.norm()))


def trainer(folder: Path, method: Any, *, rows: int = 2, callbacks: bool = True, **options: Any) -> tuple[Any, Slopes]:
    torch.manual_seed(1)
    model = method.attach(tiny_llama())
    slopes = Slopes(model)
    defaults = {"learning_rate": 1e-3, "max_steps": 6, "optim": "sgd", "max_grad_norm": 0.0, "save_strategy": "no"}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=rows,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
        logging_steps=1,
        **{**defaults, **options},
    )
    given = [*method.callbacks(), slopes] if callbacks else [slopes]
    return Trainer(model=model, args=arguments, train_dataset=ROWS, callbacks=given), slopes


def state(method: Any) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in method.state_dict().items()}


@pytest.mark.parametrize("name", NAMES)
def test_schedule_clipping_and_log_are_the_trainers(name: str, tmp_path: Path) -> None:
    method = finetune.method(name, queries=2)
    training, slopes = trainer(
        tmp_path, method, max_grad_norm=0.5, lr_scheduler_type="linear", warmup_steps=2, learning_rate=1e-2
    )
    training.train()
    logs = [entry for entry in training.state.log_history if "loss" in entry]
    rates = [entry["learning_rate"] for entry in logs]
    assert rates == pytest.approx([0.0, 0.005, 0.01, 0.0075, 0.005, 0.0025])
    clipped = [min(entry["grad_norm"], 0.5) for entry in logs]
    assert slopes.slopes == pytest.approx(clipped, rel=1e-4)
    # SGD's step: minus the rate of that step times the clipped slope.
    lengths = method.state_dict()["training/distances"].norm(dim=1).tolist()
    assert lengths == pytest.approx([rate * slope for rate, slope in zip(rates, slopes.slopes, strict=True)], rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_accumulating_two_batches_is_one_of_twice_the_size(name: str, tmp_path: Path) -> None:
    found = []
    for rows, accumulated in ((4, 1), (2, 2)):
        method = finetune.method(name)
        training, _ = trainer(tmp_path, method, rows=rows, gradient_accumulation_steps=accumulated)
        training.train()
        found.append(state(method)["training/distances"])
    # A slope is a difference of losses near 6 in float32 over 2 eps: 5e-4 of error at eps = 1e-3, times the rate 1e-3.
    torch.testing.assert_close(found[0], found[1], atol=2e-6, rtol=1e-3)


@pytest.mark.parametrize(("name", "config"), [("mezo", {}), ("lozo", {"lazy_interval": 4, "momentum": 0.9})])
def test_it_goes_on_from_any_step_as_if_never_stopped(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "warmup_steps": 2, "lr_scheduler_type": "linear"}
    whole = finetune.method(name, **config)
    trainer(tmp_path, whole, gradient_accumulation_steps=2, **options)[0].train()
    expected = state(whole)
    for stop in range(1, 6):
        resumed = finetune.method(name, **config)
        again, _ = trainer(tmp_path, resumed, gradient_accumulation_steps=2, **options)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
        found = state(resumed)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), stop


def test_an_adapter_goes_on_too(tmp_path: Path) -> None:
    def start() -> tuple[Any, Any]:
        method = build_method([{"name": "lora", "r": 2}, {"name": "mezo", "eps": 1e-2}])
        return method, trainer(tmp_path, method, save_strategy="steps", save_steps=3)[0]

    whole, training = start()
    training.train()
    resumed, again = start()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    expected, found = state(whole), state(resumed)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls_with_the_trainers_own_optimizer(name: str, tmp_path: Path) -> None:
    method = finetune.method(name)
    training, _ = trainer(tmp_path, method, rows=16, max_steps=60, optim="adamw_torch_fused", learning_rate=3e-3)
    training.train()
    losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.05


def test_a_gradient_scaler_is_refused(tmp_path: Path) -> None:
    method = finetune.method("lozo")
    training, _ = trainer(tmp_path, method)
    training.args.fp16 = True
    with pytest.raises(CapabilityError, match="differences of the loss"):
        training.train()


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    method = finetune.method("mezo")
    training, _ = trainer(tmp_path, method)
    training.args.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(CapabilityError, match="no optimizer state that DeepSpeed could shard"):
        method.check_arguments(training.args)


TWO_PROCESSES = """
import sys
import torch, torch.distributed
from torch.nn.parallel import DistributedDataParallel
import finetune
from support.distributed import distributed, own_rows, save_results
from support.tiny import tiny_llama

results = {}
for name, config in {"mezo": {"queries": 2}, "lozo": {"lazy_interval": 7, "directions": "shared"}}.items():
    method = finetune.method(name, **config)
    model = method.attach(tiny_llama())
    sent, wrapped = [], model
    if distributed:
        wrapped = DistributedDataParallel(model)
        def count(state, bucket):
            sent.append(bucket.buffer().numel() * bucket.buffer().element_size())
            work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
            return work.then(lambda done: done.value()[0])
        wrapped.register_comm_hook(None, count)
    optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=1e-3)
    for step in range(20):
        mine = own_rows(step)
        wrapped(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = method.state_dict()
    equal = True
    if distributed:
        flat = torch.cat([tensor.double().flatten() for _, tensor in sorted(state.items())])
        both = [torch.empty_like(flat) for _ in range(2)]
        torch.distributed.all_gather(both, flat)
        equal = torch.equal(both[0], both[1])
        buffers_sent = wrapped.will_sync_module_buffers() and len(list(wrapped.modules_buffers)) > 0
    else:
        buffers_sent = False
    results[name] = {"state": state, "equal": equal, "sent": sent, "buffers": buffers_sent}
save_results(results)
"""


@pytest.mark.multi_process
def test_two_processes_exchange_slopes_only_and_stay_equal_to_the_bit(tmp_path: Path) -> None:
    one, two = one_and_two_processes(tmp_path, TWO_PROCESSES)
    for name, directions in (("mezo", 2), ("lozo", 1)):
        assert two[name]["equal"]
        assert two[name]["sent"] == [4 * directions] * 20  # bytes: at most 64 a step
        assert not two[name]["buffers"]
        for key, tensor in one[name]["state"].items():
            # The mean of two means, in another order: differences of losses are good to 5e-4 at eps = 1e-3.
            torch.testing.assert_close(two[name]["state"][key], tensor, atol=2e-4, rtol=1e-2)


INDEPENDENT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import finetune
from support.distributed import rank, save_results
from support.tiny import tiny_llama, token_batch

results = {}
for name, config in {"mezo": {"directions": "independent", "queries": 2}, "lozo": {"lazy_interval": 8}}.items():
    method = finetune.method(name, **config)
    model = method.attach(tiny_llama())
    wrapped, sent = DistributedDataParallel(model), []
    def count(state, bucket):
        sent.append(bucket.buffer().numel() * bucket.buffer().element_size())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
        return work.then(lambda done: done.value()[0])
    wrapped.register_comm_hook(None, count)
    optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=1e-3)
    for step in range(20):
        mine = token_batch(8, 10, seed=step)[2 * rank : 2 * rank + 2]
        wrapped(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = method.state_dict()
    flat = torch.cat([tensor.double().flatten() for _, tensor in sorted(state.items())])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    results[name] = {"state": state, "equal": all(torch.equal(one, flat) for one in every), "sent": sent}
    before = {key: tensor.clone() for key, tensor in method.learned_tensors().items()}
    # One process's loss is not finite: none of them moves.
    (wrapped(input_ids=mine, labels=mine).loss * (float("nan") if rank == 1 else 1.0)).backward()
    optimizer.step()
    still = torch.tensor(all(torch.equal(t, before[key]) for key, t in method.learned_tensors().items()))
    dist.all_reduce(still, dist.ReduceOp.MIN)
    results[name]["still"] = bool(still)
save_results(results)
"""


@pytest.mark.multi_process
@pytest.mark.parametrize("processes", [2, 4])
def test_directions_of_each_process_stay_equal_to_the_bit_and_replay_on_one(processes: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INDEPENDENT)
    run_script(script, tmp_path / "out.pt", processes=processes)
    results = torch.load(tmp_path / "out.pt")
    for name, own in (("mezo", 2), ("lozo", 1)):
        found, total = results[name], own * processes
        assert found["equal"]
        assert found["still"]
        assert found["sent"][:20] == [4 * total] * 20  # bytes: at most 64 a step
        distances = found["state"]["training/distances"]
        # One process measures along each direction on the rows of the process whose direction it is.
        config = {"directions": "shared", "queries": total}
        method = finetune.method(name, **config, **({"lazy_interval": 8} if name == "lozo" else {}))
        model = method.attach(tiny_llama()).eval()
        expected = []
        for query in range(total):
            rank = query // own
            rows = token_batch(8, 10, seed=0)[2 * rank : 2 * rank + 2]
            losses = []
            for scale in (method.config.eps, -method.config.eps):
                with torch.no_grad(), method._directions.perturbed(query, scale):
                    losses.append(model(input_ids=rows, labels=rows).loss.item())
            expected.append(-1e-3 * (losses[0] - losses[1]) / (2 * method.config.eps) / total)
        torch.testing.assert_close(distances[0], torch.tensor(expected), atol=1e-6, rtol=1e-3)
        method.replay(distances, found["state"]["training/decays"])
        assert all(torch.equal(tensor, found["state"][key]) for key, tensor in method.state_dict().items())
        loaded = finetune.method(name, **({"lazy_interval": 8} if name == "lozo" else {}))
        loaded.attach(tiny_llama())
        loaded.load_state_dict(found["state"])
        learned = method.learned_tensors()
        assert all(torch.equal(tensor, learned[key]) for key, tensor in loaded.learned_tensors().items())
        with pytest.raises(TrainingError, match="another number of processes"):
            torch.optim.SGD(loaded.trained_parameters().values(), lr=1e-3).step()


SPLIT = """
import sys
import torch, torch.distributed as dist
import finetune
from finetune.core.errors import TrainingError
from support.distributed import distributed, rank, save_results
from support.tiny import tiny_llama, token_batch

WORLD = dist.get_world_size() if distributed else 1
SENT = []
gather = dist.all_gather
def counted(every, own, **rest):
    SENT.append(own.numel() * own.element_size())
    return gather(every, own, **rest)
dist.all_gather = counted

def batch(step, first, last):
    ids = token_batch(4, 10, seed=step)
    labels = ids.clone()
    labels[0, 3:] = -100  # rows of unlike numbers of labelled tokens: the mean is over tokens
    return {"input_ids": ids[first:last], "labels": labels[first:last]}

results = {}
for name, config, members in (
    ("mezo", {"directions": "shared"}, 2),
    ("lozo", {"directions": "shared", "lazy_interval": 7, "queries": 2}, WORLD),
    ("lozo", {"directions": "independent", "queries": 2}, 2),
    ("fzoo", {"queries": 7}, min(WORLD, 4)),
):
    members = min(members, WORLD)
    method = finetune.method(name, **config, perturbation_parallel=members)
    model = method.attach(tiny_llama(dtype=torch.float64))
    optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=1e-3)
    group, groups = rank // members, WORLD // members
    passes, sent = [], []
    forward = model.model.forward
    def seen(*args, **kwargs):
        passes.append(1)
        return forward(*args, **kwargs)
    model.model.forward = seen
    for step in range(20):
        SENT.clear()
        passes.clear()
        # No wrapper: the slopes are those of all processes already.
        model(**batch(step, 4 * group // groups, 4 * (group + 1) // groups)).loss.backward()
        sent.append(sum(SENT))
        optimizer.step()
        optimizer.zero_grad()
    if distributed:
        flat = torch.cat([tensor.double().flatten() for _, tensor in sorted(method.state_dict().items())])
        every = [torch.empty_like(flat) for _ in range(WORLD)]
        gather(every, flat)
        assert all(torch.equal(one, flat) for one in every)
    said, counted_passes = "", len(passes)
    if distributed and members == 2:
        try:
            model(**batch(0, rank, rank + 1))
        except TrainingError as error:
            said = str(error)
    results[name, config.get("directions", "")] = {
        "state": method.state_dict(), "sent": sent, "passes": counted_passes, "said": said,
    }
save_results(results)
"""


@pytest.mark.multi_process
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_that_split_the_passes_do_what_one_does(processes: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPLIT)
    results = []
    for count in (1, processes):
        run_script(script, tmp_path / "out.pt", processes=count)
        results.append(torch.load(tmp_path / "out.pt"))
    one, found = results
    for case, passes in (
        (("mezo", "shared"), 2),
        (("lozo", "shared"), 4),
        (("lozo", "independent"), 4),
        (("fzoo", ""), 8),
    ):
        alike = processes == 2 or case[1] != "independent"  # two groups have twice the directions
        assert one[case]["passes"] == passes
        members = processes if case in (("lozo", "shared"), ("fzoo", "")) else 2
        assert found[case]["passes"] == passes // members
        assert found[case]["sent"][1:] == [8 * (passes // members + 2)] * 19
        assert max(found[case]["sent"][1:]) <= 64
        for key, tensor in one[case]["state"].items() if alike else ():
            other = found[case]["state"][key]
            if members == processes:
                assert torch.equal(other, tensor), f"{case} {key}"
            else:  # transformers rounds the losses of both halves to float32: 1e-4 of a slope
                torch.testing.assert_close(other, tensor, atol=2e-5, rtol=1e-3, msg=f"{case} {key}")
        assert ("have been given different" in found[case]["said"]) == (members == 2)


def test_members_that_do_not_divide_the_passes_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 does not divide the 4 forward passes of a step of 2 direction"):
        finetune.method("mezo", queries=2, perturbation_parallel=3)
    method = finetune.method("mezo", perturbation_parallel=2)
    ids = token_batch(4, 10)
    with pytest.raises(TrainingError, match="do not divide into groups"):
        method.attach(tiny_llama())(input_ids=ids, labels=ids)


ON_SHARDS = """
import torch
import finetune
from finetune.methods.primitives.sharding import take_apart
from support.distributed import distributed, own_rows, rank, save_results, shard
from support.tiny import tiny_llama

results = {}
for case, config in {
    "lozo": {"lazy_interval": 3, "directions": "shared"},
    "mezo": {"queries": 2, "noise": "binomial"},
    "mezo copy": {"engine": "copy"},
    "sparse_mezo": {},
    "fzoo": {"queries": 3},
}.items():
    method = finetune.method(case.partition(" ")[0], **config)
    model = method.attach(tiny_llama(dtype=torch.float64))
    shard(model, model.model.layers, ignored_params={model.projected_gradient})
    optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=1e-3, weight_decay=0.1)
    for step in range(6):
        mine = own_rows(step)
        model(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            with torch.no_grad():  # an evaluation leaves what FSDP2 gathered; the next step has to see it moved
                model(input_ids=mine, labels=mine)
    take_apart(model)
    before = {key: tensor.clone() for key, tensor in method.state_dict().items()}
    moved = method.state_dict()
    if case == "mezo copy":
        # The noise of shards is that of the whole tensor, to the bit, and comes off without a trace.
        with torch.no_grad(), method._directions.perturbed(0, 0.5):
            take_apart(model)
            moved = {key: tensor.clone() for key, tensor in method.state_dict().items()}
        take_apart(model)
        method.load_state_dict(before)
        after = method.state_dict()
        assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    results[case] = {"state": before, "moved": moved}
if distributed:
    for config in ({"directions": "independent"}, {"perturbation_parallel": 2}):
        method = finetune.method("mezo", **config)
        model = method.attach(tiny_llama())
        shard(model, model.model.layers, ignored_params={model.projected_gradient})
        try:
            model(input_ids=mine, labels=mine)
        except finetune.core.errors.CapabilityError as error:
            results[str(config)] = str(error)
save_results(results)
"""


@pytest.mark.multi_process
def test_sharded_weights_are_read_and_moved_as_whole_ones_are(tmp_path: Path) -> None:
    one, two = one_and_two_processes(tmp_path, ON_SHARDS)
    for case, expected in one.items():
        found = two[case]
        for key, tensor in expected["state"].items():
            # transformers rounds the losses of both halves to float32: 1e-4 of a slope at eps = 1e-3
            torch.testing.assert_close(found["state"][key], tensor, atol=2e-5, rtol=2e-3, msg=f"{case} {key}")
    noise = {
        count: {
            key: results["mezo copy"]["moved"][key] - tensor for key, tensor in results["mezo copy"]["state"].items()
        }
        for count, results in ((1, one), (2, two))
    }
    for key, tensor in noise[1].items():
        assert torch.equal(tensor.sign(), noise[2][key].sign())
        if key.endswith(".value"):
            assert set(tensor.abs().mul(2).round(decimals=6).unique().tolist()) == {1.0}
    refused = [error for case, error in two.items() if case.startswith("{")]
    assert len(refused) == 2
    assert all("every process has a part of the same weights" in error for error in refused)
