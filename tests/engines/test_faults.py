"""A process that dies ends the others, and they go on from the last checkpoint: bit for bit, or as other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from support.runs import finish, learned, logged, start, wait_for
from support.workshop import write_workshop

STEPS = 12

pytestmark = [pytest.mark.integration, pytest.mark.multi_process]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a recipe beside whose run lies that of two processes that nobody disturbs."""
    recipe = write_workshop(
        tmp_path_factory.mktemp("faults"),
        [{"prompt": f"say {i}", "completion": "x" * (i % 7 + 1)} for i in range(37)],
        "method: {name: lora, r: 4, target_modules: all-linear, lora_dropout: 0.1}",
        f"train: {{per_device_train_batch_size: 2, learning_rate: 1e-2, max_steps: {STEPS}, save_steps: 2, "
        "save_total_limit: 2, logging_steps: 1, adam_epsilon: 1e-3}",
    )
    finish(start(recipe, into(recipe, "alone"), "--nproc", "2"))
    return recipe


def into(recipe: Path, run: str) -> str:
    return f"output_dir={recipe.parent / run}"


def kill_second(launcher: subprocess.Popen[str]) -> None:
    """Sends SIGKILL to the second process of a launcher."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    second = [pid for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(int(second[0]), signal.SIGKILL)


def test_a_process_that_is_killed_ends_the_others_and_is_named(recipe: Path) -> None:
    ended = into(recipe, "ended")
    exact = "method.lora_dropout=0"  # what is dropped depends on the process
    process = start(recipe, ended, exact, "--nproc", "2")
    assert wait_for(logged(recipe.parent / "ended", 5), process)
    kill_second(process)
    killed = time.monotonic()
    errors = finish(process, code=1)
    assert time.monotonic() - killed < 60
    assert "process 1 of 2 was killed by SIGKILL" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors

    # The rest of the same steps in one process: what two have saved, one loads, and the order of the rows stays.
    one = "train.per_device_train_batch_size=4"
    assert "equal to rounding" in finish(start(recipe, ended, exact, one, "--resume"))
    finish(start(recipe, into(recipe, "once"), exact, one))
    for name, tensor in learned(recipe.parent / "once").items():
        torch.testing.assert_close(learned(recipe.parent / "ended")[name], tensor, atol=2e-6, rtol=1e-5)
    assert "rows per step" in finish(start(recipe, ended, exact, "--resume", "--nproc", "4"), code=2)


@pytest.mark.parametrize("moment", ["step", "save"])
def test_they_start_again_by_themselves_and_end_as_if_nothing_had_happened(recipe: Path, moment: str) -> None:
    run = recipe.parent / moment
    process = start(recipe, into(recipe, moment), "--nproc", "2", "--max-restarts", "1")
    late = logged(run, 5)
    assert wait_for(lambda: late() and (moment == "step" or (run / ".saving").exists()), process)
    kill_second(process)
    finish(process)
    expected, found = learned(recipe.parent / "alone"), learned(run)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert json.loads((run / "run.json").read_text())["status"] == "completed"
