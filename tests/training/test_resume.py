"""A run that is killed with SIGKILL at random moments and resumed ends with the same weights, bit for bit."""

from __future__ import annotations

import json
import os
import random
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


def write_recipe(folder: Path, model: Path, method: str, output: str) -> Path:
    rows = [{"prompt": f"say {i}", "completion": "x" * (i % 7 + 1)} for i in range(37)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / f"{output}.yaml"
    recipe.write_text(
        f"model: {{name_or_path: {model}, dtype: float32, device: cpu}}\n"
        f"method: {METHODS[method]}\n"
        f"data: {{train: {folder / 'rows.jsonl'}}}\n"
        "train: {per_device_train_batch_size: 2, gradient_accumulation_steps: 3, learning_rate: 1e-2, "
        f"max_steps: {STEPS}, save_steps: 3, save_total_limit: 2, logging_steps: 1}}\n"
        f"output_dir: {folder / output}\n"
    )
    return recipe


def start(recipe: Path, *flags: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FINETUNE_CACHE": str(recipe.parent / "cache")}
    command = [sys.executable, "-m", "finetune", "train", str(recipe), *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    _, errors = process.communicate(timeout=180)
    assert process.returncode == code, errors
    return errors


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file.name}:{name}": tensor
        for file in sorted((run / "final").glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def logged(run: Path, steps: int) -> Callable[[], bool]:
    """Returns a condition that holds once so many steps are logged."""
    metrics = run / "metrics.jsonl"
    return lambda: metrics.is_file() and metrics.read_text().count("\n") >= steps


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Waits until ``condition`` holds; False where the process ended before."""
    while not condition():
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return True


@pytest.mark.parametrize("method", list(METHODS))
def test_killed_runs_end_as_the_run_left_alone(tmp_path: Path, method: str) -> None:
    model = save_tiny_model(tmp_path / "model")
    alone = write_recipe(tmp_path, model, method, "alone")
    finish(start(alone))
    killed = write_recipe(tmp_path, model, method, "killed")
    run, generator = tmp_path / "killed", random.Random(method)

    process = start(killed)
    # While saving: as soon as the staging folder of a checkpoint appears.
    saving = wait_for((run / ".saving").exists, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert saving, "the run ended before it saved"
    for _ in range(2):
        process = start(killed, "--resume")
        wait_for(logged(run, generator.randint(4, STEPS - 4)), process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(start(killed, "--resume"))

    expected, found = weights(tmp_path / "alone"), weights(run)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    lines = [[json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()] for name in ("alone", "killed")]
    assert [(line["step"], line["loss"]) for line in lines[0]] == [(line["step"], line["loss"]) for line in lines[1]]
    assert not (run / ".saving").exists()


def test_ctrl_c_writes_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    recipe = write_recipe(tmp_path, model, "s2ft", "run")
    process = start(recipe)
    assert wait_for(logged(tmp_path / "run", 1), process)
    process.send_signal(signal.SIGINT)
    errors = finish(process, code=130)
    assert "--resume" in errors
    assert "Traceback" not in errors
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
    finish(start(recipe, "--resume"))

    # The same recipe with another accumulation, method or data is another run.
    for override, part in {
        "train.gradient_accumulation_steps=2": "rows per step",
        "method.ratio=0.2": "method config",
        "data.max_length=64": "data fingerprint",
    }.items():
        assert part in finish(start(recipe, "--resume", override), code=2)
