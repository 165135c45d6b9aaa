"""``finetune estimate`` on the bundled model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.real]

TOTAL = 134_515_008


def estimate(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "finetune", "estimate", "quickstart", "method=lora", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=90, check=False)


def as_json(*arguments: str, folder: Path) -> dict[str, Any]:
    done = estimate("--json", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_parts_add_up_and_nothing_is_written(tmp_path: Path) -> None:
    found = as_json(folder=tmp_path)
    assert sum(found["parts"].values()) == found["peak_bytes"] == max(found["moments"].values())
    # The frozen weights, and the rotary frequencies: 32 values, kept twice.
    assert found["parts"]["weights"] == 4 * TOTAL + 2 * 4 * 32
    trained = 30 * 8 * (576 + 576 + 576 + 192)  # q and v, rank 8
    assert found["parts"]["trained"] == 4 * trained
    assert found["parts"]["optimizer"] == 8 * trained
    assert list(tmp_path.iterdir()) == []


def test_checkpointing_and_fewer_rows_keep_less(tmp_path: Path) -> None:
    whole = as_json(folder=tmp_path)["parts"]["activations"]
    half = as_json("train.per_device_train_batch_size=4", folder=tmp_path)["parts"]["activations"]
    assert half == whole / 2
    assert as_json("train.activation_checkpointing=true", folder=tmp_path)["parts"]["activations"] < half


def test_the_table_names_the_peak_and_what_makes_it_less(tmp_path: Path) -> None:
    text = estimate(folder=tmp_path).stdout
    for part in ("weights", "activations", "optimizer", "peak", "start of the backward pass", "fits: ", "train."):
        assert part in text
