"""A run that is killed with SIGKILL at random moments and resumed ends with the same weights, bit for bit."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
import torch

from support.runs import finish, learned, logged, start, wait_for
from support.workshop import write_workshop

METHODS = {
    "lora": "{name: lora, r: 4, target_modules: all-linear, lora_dropout: 0.1}",
    "s2ft": "{name: s2ft, ratio: 0.1}",
    "full": "{name: full}",
    "id3": "{name: id3, budget: 0.02}",  # killed in the middle of the schedule
    "spiel": "{name: spiel, budget: 0.02, every: 6, gradient_steps: 3}",
    "lozo": "{name: lozo, lazy_interval: 7, momentum: 0.9, eps: auto}",
    "masked_mezo": "[{name: magnitude, budget: 0.05}, {name: mezo, queries: 2}]",
}
STEPS = 24

pytestmark = pytest.mark.integration


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    rows = [{"prompt": f"say {i}", "completion": "x" * (i % 7 + 1)} for i in range(37)]
    return write_workshop(
        tmp_path,
        rows,
        "train: {per_device_train_batch_size: 2, gradient_accumulation_steps: 3, learning_rate: 1e-2, "
        f"max_steps: {STEPS}, save_steps: 3, save_total_limit: 2, logging_steps: 1}}",
    )


@pytest.mark.parametrize("method", list(METHODS))
def test_killed_runs_end_as_the_run_left_alone(recipe: Path, tmp_path: Path, method: str) -> None:
    chosen = f"method={METHODS[method]}"
    finish(start(recipe, chosen, f"output_dir={tmp_path / 'alone'}"))
    run, generator = tmp_path / "run", random.Random(method)

    process = start(recipe, chosen)
    # While saving: as soon as the staging folder of a checkpoint appears.
    saving = wait_for((run / ".saving").exists, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert saving, "the run ended before it saved"
    for _ in range(2):
        process = start(recipe, chosen, "--resume")
        wait_for(logged(run, generator.randint(4, STEPS - 4)), process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(start(recipe, chosen, "--resume"))

    expected, found = learned(tmp_path / "alone"), learned(run)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    lines = [[json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()] for name in ("alone", "run")]
    assert [(line["step"], line["loss"]) for line in lines[0]] == [(line["step"], line["loss"]) for line in lines[1]]
    assert not (run / ".saving").exists()


def test_ctrl_c_writes_a_checkpoint_and_says_how_to_go_on(recipe: Path, tmp_path: Path) -> None:
    chosen = f"method={METHODS['s2ft']}"
    process = start(recipe, chosen)
    assert wait_for(logged(tmp_path / "run", 1), process)
    process.send_signal(signal.SIGINT)
    errors = finish(process, code=130)
    assert "--resume" in errors
    assert "Traceback" not in errors
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
    finish(start(recipe, chosen, "--resume"))

    # The same recipe with another accumulation, method or data is another run.
    for override, part in {
        "train.gradient_accumulation_steps=2": "rows per step",
        "method.ratio=0.2": "method config",
        "data.max_length=64": "data fingerprint",
    }.items():
        assert part in finish(start(recipe, chosen, "--resume", override), code=2)
