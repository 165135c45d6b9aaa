"""Every registered method on two processes, replicated and sharded: what one process trains, saves and goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.engines.capabilities import unsupported
from finetune.methods import METHODS, discover
from support.conformance_cases import CASES
from support.processes import one_and_two_processes

RANDOM = {
    "mosa": "it draws experts per forward pass, and one process makes twice as many of those",
    "pvera": "it draws noise for every row",
    "fzoo": "it divides by the deviation of each batch's losses over its directions",
}
"""Methods whose gradient is not the mean over the micro-batches, and why."""

SCRIPT = """
import copy, sys
import torch
from accelerate.state import GradientState
from torch.nn.parallel import DistributedDataParallel
from support.distributed import distributed, rank, save_results
from support.conformance_cases import base_model, make
from support.tiny import token_batch
from finetune.engines.choose import choose_engine
from finetune.engines.capabilities import unsupported
from finetune.config.schema import EngineSection

PROCESSES = 2 if distributed else 1
ROWS, MICRO = 8, 2  # of a global batch, and of one forward pass


def steps(engine, network, method, optimizer, numbers):
    accumulation = ROWS // MICRO // PROCESSES
    for number in numbers:
        batch = token_batch(ROWS, 10, seed=number)
        for part in range(accumulation):
            start = MICRO * (part * PROCESSES + rank)
            rows = batch[start : start + MICRO]
            GradientState()._set_sync_gradients(part == accumulation - 1)  # as every trainer says it
            task = {"tasks": ["one"] * MICRO} if method.routes else {}
            with engine.micro_batch(last=part == accumulation - 1):
                (network(input_ids=rows, labels=rows, **task).loss / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()


def run(name, strategy):
    base = base_model(name, layers=4) if name != "bitfit" else base_model(name)
    method = make(name)
    torch.manual_seed(3)
    ids = token_batch(4, 16)
    model = method.attach(base, calibration=[{"input_ids": ids, "labels": ids}])
    method.bind(total_steps=6)
    engine = choose_engine(strategy if distributed else "single", EngineSection(), PROCESSES, method)
    engine.prepare(model, method, torch.device("cpu"))
    network = model.train()
    if distributed and not engine.owns_model:
        network = DistributedDataParallel(model)
    # Adam's first step of a gradient near zero is a matter of rounding, unless eps is above it.
    optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    engine.begin()
    torch.manual_seed(5)
    steps(engine, network, method, optimizer, range(2))
    state = {key: tensor.clone() for key, tensor in method.state_dict().items()}
    held = copy.deepcopy(engine.optimizer_state(optimizer))
    torch.manual_seed(6)
    steps(engine, network, method, optimizer, range(2, 4))
    after = {key: tensor.clone() for key, tensor in method.state_dict().items()}
    sent = engine.reducer.bytes if engine.owns_model else None
    return {"state": state, "optimizer": held, "after": after, "sent": sent, "trained": method.summary().trained}


results = {}
for name in sys.argv[2].split(","):
    for strategy in ("ddp", "fsdp"):
        if unsupported(make(name), strategy):
            continue
        try:
            results[name, strategy] = run(name, strategy)
        except Exception as error:
            raise RuntimeError(f"{name} {strategy}") from error
save_results(results)
"""

OWN = ["full", "freeze", "spectrum", "lisa", "badam", "cofitune", "s2ft", "id3", "fish", "spiel", "lozo", "mezo"]
OWN += ["mos", "mhr", "lora", "dora", "adalora", "prompt_tuning", "trainable_tokens"]


def check(folder: Path, names: list[str]) -> None:
    one, two = one_and_two_processes(folder, SCRIPT, ",".join(names))
    assert one.keys() == two.keys()
    assert {name for name, _ in one} == set(names)
    for (name, strategy), expected in one.items():
        found = two[name, strategy]
        for moment in ("state", "after"):
            require_close(expected[moment], found[moment], f"{name} {strategy} {moment}", loose=name in RANDOM)
        numbers = [{key: value.shape for key, value in own.items()} for own in expected["optimizer"]["state"].values()]
        assert numbers == [
            {key: value.shape for key, value in own.items()} for own in found["optimizer"]["state"].values()
        ], (name, strategy)


def require_close(expected: Any, found: Any, what: str, *, loose: bool) -> None:
    assert expected.keys() == found.keys(), what
    for key, tensor in expected.items():
        assert tensor.shape == found[key].shape, f"{what} {key}"
        if not loose:
            torch.testing.assert_close(found[key], tensor, atol=2e-6, rtol=1e-5, msg=lambda m, k=key: f"{what} {k} {m}")


@pytest.mark.multi_process
@pytest.mark.integration
def test_two_processes_train_and_save_what_one_does(tmp_path: Path) -> None:
    check(tmp_path, OWN)


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.integration
def test_the_other_methods_do_too(tmp_path: Path) -> None:
    check(tmp_path, [case.values[0] for case in CASES if case.values[0] not in OWN and not case.marks])


def test_what_needs_whole_weights_says_why() -> None:
    refused = {name for name in discover() if unsupported(METHODS.get(name), "fsdp")}
    assert refused == {"shadow"}
    assert not any(unsupported(METHODS.get(name), strategy) for name in discover() for strategy in ("single", "ddp"))
