"""Recipes whose activations wait on disk: the same run, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune.config.load import load_recipe
from finetune.config.schema import EngineSection
from finetune.core.errors import CapabilityError
from finetune.engines.choose import choose_engine
from finetune.methods import build_method
from finetune.training.activations import check_activations
from finetune.training.run import train
from support.tiny import save_tiny_model


def test_a_run_learns_the_same_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    save_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"say {i} " * 20, "completion": "yes " * 30} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{name_or_path: {tmp_path / 'model'}, dtype: float32, device: cpu}}\n"
        "method: {name: lora, r: 4, target_modules: all-linear, lora_dropout: 0.1}\n"
        f"data: {{train: {tmp_path / 'rows.jsonl'}}}\n"
        "train: {per_device_train_batch_size: 4, gradient_accumulation_steps: 2, learning_rate: 1e-2, max_steps: 3}\n"
        "output_dir: unset\n"
    )
    learned = []
    for place in ("none", "disk"):
        overrides = [f"engine.offload.activations={place}", f"output_dir={tmp_path / place}"]
        result = train(load_recipe([str(tmp_path / "recipe.yaml")], overrides))
        assert result.status == "completed"
        learned.append(load_file(next((tmp_path / place / "final").glob("*.safetensors"))))
    assert learned[0].keys() == learned[1].keys()
    assert all(torch.equal(learned[1][name], tensor) for name, tensor in learned[0].items())


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
