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
import sys
from support.conformance_cases import make
from support.distributed import save_results
from support.engine_steps import EngineSteps
from finetune.engines.capabilities import unsupported

results = {}
for name in sys.argv[2].split(","):
    for strategy in ("ddp", "fsdp"):
        if unsupported(make(name), strategy):
            continue
        try:
            run = EngineSteps(name, strategy)
            state = run.train(range(2), seed=5)
            held = run.optimizer_state()
            results[name, strategy] = {"state": state, "optimizer": held, "after": run.train(range(2, 4), seed=6)}
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
        numbers = [{key: value.shape for key, value in own.items()} for own in expected["optimizer"].values()]
        assert numbers == [{key: value.shape for key, value in own.items()} for own in found["optimizer"].values()], (
            name,
            strategy,
        )


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
