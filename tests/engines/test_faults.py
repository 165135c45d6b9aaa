"""A process that dies ends the others, and they go on from the last checkpoint: bit for bit, or as other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.tiny import save_tiny_model

STEPS = 12

pytestmark = [pytest.mark.integration, pytest.mark.multi_process]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and rows; and the run of two processes that nobody disturbs."""
    folder = tmp_path_factory.mktemp("faults")
    save_tiny_model(folder / "model")
    rows = [{"prompt": f"say {i}", "completion": "x" * (i % 7 + 1)} for i in range(37)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(
        f"model: {{name_or_path: {folder / 'model'}, dtype: float32, device: cpu}}\n"
        "method: {name: lora, r: 4, target_modules: all-linear, lora_dropout: 0.1}\n"
        f"data: {{train: {folder / 'rows.jsonl'}}}\n"
        f"train: {{per_device_train_batch_size: 2, learning_rate: 1e-2, max_steps: {STEPS}, save_steps: 2, "
        "save_total_limit: 2, logging_steps: 1, adam_epsilon: 1e-3}\n"
        "output_dir: unset\n"
    )
    finish(start(folder, "alone", "--nproc", "2"))
    return folder


def start(folder: Path, run: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FINETUNE_CACHE": str(folder / "cache")}
    recipe = [str(folder / "recipe.yaml"), f"output_dir={folder / run}"]
    command = [sys.executable, "-m", "finetune", "train", *recipe, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    _, errors = process.communicate(timeout=200)
    assert process.returncode == code, errors[-3000:]
    return errors


def learned(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "final").glob("*.safetensors")))


def kill_second(launcher: subprocess.Popen[str]) -> None:
    """Sends SIGKILL to the second process of a launcher."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    second = [pid for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(int(second[0]), signal.SIGKILL)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.002)


def steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.is_file() else 0


def test_a_process_that_is_killed_ends_the_others_and_is_named(workshop: Path) -> None:
    exact = "method.lora_dropout=0"  # what is dropped depends on the process
    process = start(workshop, "ended", exact, "--nproc", "2")
    wait_for(lambda: steps(workshop / "ended") > 4, process)
    kill_second(process)
    killed = time.monotonic()
    errors = finish(process, code=1)
    assert time.monotonic() - killed < 60
    assert "process 1 of 2 was killed by SIGKILL" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors

    # The rest of the same steps in one process: what two have saved, one loads, and the order of the rows stays.
    one = "train.per_device_train_batch_size=4"
    assert "equal to rounding" in finish(start(workshop, "ended", exact, one, "--resume"))
    finish(start(workshop, "once", exact, one))
    for name, tensor in learned(workshop / "once").items():
        torch.testing.assert_close(learned(workshop / "ended")[name], tensor, atol=2e-6, rtol=1e-5)
    assert "rows per step" in finish(start(workshop, "ended", exact, "--resume", "--nproc", "4"), code=2)


@pytest.mark.parametrize("moment", ["step", "save"])
def test_they_start_again_by_themselves_and_end_as_if_nothing_had_happened(workshop: Path, moment: str) -> None:
    run = workshop / moment
    process = start(workshop, moment, "--nproc", "2", "--max-restarts", "1")
    wait_for(lambda: steps(run) > 4 and (moment == "step" or (run / ".saving").exists()), process)
    kill_second(process)
    finish(process)
    expected, found = learned(workshop / "alone"), learned(run)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert json.loads((run / "run.json").read_text())["status"] == "completed"
