"""Recipes whose activations wait on disk: the same run, and what is refused."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune.config.load import load_recipe
from finetune.config.schema import EngineSection
from finetune.core.errors import CapabilityError
from finetune.core.files import incomplete_reason
from finetune.engines.choose import choose_engine
from finetune.methods import build_method
from finetune.training.activations import check_activations
from finetune.training.run import train
from support.workshop import write_workshop


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": f"say {i} " * 20, "completion": "yes " * 30} for i in range(16)]
    return write_workshop(
        tmp_path,
        rows,
        "method: {name: lora, r: 4, target_modules: all-linear, lora_dropout: 0.1}",
        "train: {per_device_train_batch_size: 4, gradient_accumulation_steps: 2, learning_rate: 1e-2, max_steps: 3}",
    )


def test_a_run_learns_the_same_bit_for_bit(recipe: Path) -> None:
    learned = []
    for place in ("none", "disk"):
        overrides = [f"engine.offload.activations={place}", f"output_dir={recipe.parent / place}"]
        result = train(load_recipe([str(recipe)], overrides))
        assert result.status == "completed"
        learned.append(load_file(next((recipe.parent / place / "final").glob("*.safetensors"))))
    assert learned[0].keys() == learned[1].keys()
    assert all(torch.equal(learned[1][name], tensor) for name, tensor in learned[0].items())
    record = json.loads((recipe.parent / "disk" / "run.json").read_text())
    assert record["activations_away_bytes"] > 0


def test_a_full_disk_ends_the_run_with_a_line_and_leaves_its_checkpoints(recipe: Path) -> None:
    train(load_recipe([str(recipe)], [f"output_dir={recipe.parent / 'run'}", "train.save_steps=1"]))
    kept = recipe.parent / "run" / "checkpoint-1"
    shutil.rmtree(recipe.parent / "run" / "final")
    record = json.loads((recipe.parent / "run" / "run.json").read_text())
    (recipe.parent / "run" / "run.json").write_text(json.dumps({**record, "status": "interrupted"}))
    command = [sys.executable, "-m", "finetune", "train", str(recipe), "--resume", str(kept)]
    command += [f"output_dir={recipe.parent / 'run'}", "train.save_steps=1", "engine.offload.activations=disk"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=_small_files)
    assert done.returncode == 1
    assert f"error: file too large\n  at   {recipe.parent / 'run'}\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert not incomplete_reason(kept)


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


@pytest.mark.parametrize(
    ("place", "strategy", "device", "fix"),
    [
        ("cpu", "single", "cpu", "engine.offload.activations: disk"),
        ("disk", "single", "cuda", "engine.offload.activations: cpu"),
        ("disk", "fsdp", "cpu", "train.activation_checkpointing: true"),
    ],
)
def test_what_helps_nobody_is_refused(place: str, strategy: str, device: str, fix: str) -> None:
    section = EngineSection.model_validate({"offload": {"activations": place}})
    engine = choose_engine(strategy, section, 1 if strategy == "single" else 2, build_method({"name": "lora"}))
    with pytest.raises(CapabilityError, match=fix):
        check_activations(section.offload, engine, torch.device(device))
