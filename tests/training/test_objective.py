"""Zeroth-order objectives through ``finetune train``: templates, options, held-out data, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import finetune
from finetune.core.errors import CapabilityError, ConfigError, DataError
from finetune.training.run import RunResult
from support.workshop import write_workshop


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a recipe that learns which of two words a sentence goes with."""
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "task.yaml").write_text("kind: choice\ndata: rows.jsonl\ntemplate: sst2\n")
    return write_workshop(
        folder,
        [{"sentence": f"{'a' if i % 2 else 'b'} {i % 7}", "label": i % 2} for i in range(24)],
        "method: {name: lozo, objective: option_likelihood}",
        "train: {optim: adamw_torch_fused, adam_beta1: 0.0, learning_rate: 1e-2, lr_scheduler_type: constant,",
        "  per_device_train_batch_size: 4, gradient_accumulation_steps: 2, max_steps: 40, logging_steps: 5,",
        "  eval_strategy: steps, eval_steps: 20}",
        f"eval: {{tasks: [{folder / 'task.yaml'}]}}",
        data="eval: 8, template: sst2, chat_template: plain",
    )


def train(recipe: Path, output: Path, *overrides: str) -> RunResult:
    return finetune.train(recipe, f"output_dir={output}", *overrides)


def test_options_are_told_apart_better(recipe: Path, tmp_path: Path) -> None:
    result = train(recipe, tmp_path / "run")
    before, after = (result.record["evaluation"][moment][0]["value"] for moment in ("before", "after"))
    assert after > before
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if "loss" in line]
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    # Of two options, each a guess costs log 2; the language model's own loss would be near 6.
    assert losses[-1] < losses[0] < 3
    assert held_out[-1] < 3


def test_accuracy_itself_is_minimised_with_its_sign_turned(recipe: Path, tmp_path: Path) -> None:
    train(recipe, tmp_path / "run", "method.objective=accuracy", "method.eps=3e-2", "method.queries=2")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert all(-1 <= loss <= 0 for loss in losses)


def test_the_table_of_eps_is_shown(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(recipe, tmp_path / "run", "method.eps=auto", "train.max_steps=2", "eval.tasks=[]")
    assert "<- chosen" in capsys.readouterr().err


def test_what_is_refused_before_the_weights_are_loaded(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no choices"):
        train(recipe, tmp_path / "run", "data.template=null", "data.columns={text: sentence}")
    with pytest.raises(CapabilityError, match="packing puts several"):
        train(recipe, tmp_path / "run", "data.packing=true")
    with pytest.raises(ConfigError, match="did you mean 'sst2'"):
        train(recipe, tmp_path / "run", "data.template=sst")
    with pytest.raises(ConfigError, match="or module:function"):
        train(recipe, tmp_path / "run", "method.objective=likelihood")
