"""The same training on several selections, measured on the same task, and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.config.load import load_recipe
from finetune.core.errors import ConfigError, RefusedError
from finetune.selection.compare import BASE, FULL, Comparison, compare
from support.workshop import write_workshop


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    return write_workshop(
        folder,
        [{"prompt": f"What is {number}?", "completion": "noon " * (1 + number % 5)} for number in range(20)],
        "method: {name: lora, r: 2}",
        "train: {per_device_train_batch_size: 2, learning_rate: 1e-2, num_train_epochs: 1}",
        f"eval: {{tasks: ['loss:{folder / 'rows.jsonl'}']}}",
        "select: {scorer: length, compare: [{name: random, seed: 1}], top: 6}",
    )


def run(recipe: Path, folder: Path, *overrides: str, **options: Any) -> Comparison:
    return compare(load_recipe([str(recipe)], [f"output_dir={folder}", *overrides]), **options)


def test_every_entry_is_trained_alike_and_measured_and_never_twice(recipe: Path, tmp_path: Path) -> None:
    found = run(recipe, tmp_path / "out")
    assert [(row["name"], row["rows"], row["steps"]) for row in found.rows] == [
        (BASE, 0, 0),
        (FULL, 20, 10),
        ("length", 6, 3),
        ("random, seed 1", 6, 3),
    ]
    losses = [next(one["value"] for one in row["results"] if one["metric"] == "loss") for row in found.rows]
    assert all(loss < losses[0] for loss in losses[1:])
    assert (tmp_path / "out" / "compare.png").stat().st_size > 10_000
    kept = (tmp_path / "out" / "length-selection" / "selected" / "rows.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["completion"].count("noon") for line in kept) == [4, 4, 5, 5, 5, 5]
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*/run.json")}
    with pytest.raises(RefusedError, match="holds a comparison"):
        run(recipe, tmp_path / "out")
    with pytest.raises(RefusedError, match="another recipe"):
        run(recipe, tmp_path / "out", "select.top=5", resume=True)
    assert run(recipe, tmp_path / "out", resume=True).rows == found.rows
    assert {file: file.stat().st_mtime_ns for file in before} == before


def test_without_tasks_there_is_nothing_to_compare_by(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(recipe, tmp_path / "out", "eval.tasks=[]")
    assert caught.value.where == "eval.tasks"
    assert not (tmp_path / "out").exists()
