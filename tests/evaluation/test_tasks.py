"""Tasks: what a task file may say, and what is said about a wrong one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from finetune.core.errors import ConfigError, DataError
from finetune.evaluation.lm_eval import results_of
from finetune.evaluation.tasks import load_rows, read_task


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_the_shipped_task_is_found_by_name_and_has_all_its_rows() -> None:
    task = read_task("cron")
    assert (task.name, task.kind) == ("cron", "exact_match")
    rows = load_rows(task, None)
    assert len(rows) == 300
    assert {row.extra["group"] for row in rows} == {"seen_phrasing", "unseen_phrasing"}


def test_a_limit_takes_evenly_spaced_rows_so_that_every_group_is_there() -> None:
    groups = [row.extra["group"] for row in load_rows(read_task("cron"), 20)]
    assert len(groups) == 20
    assert 4 <= groups.count("unseen_phrasing") <= 7


def test_data_is_relative_to_the_task_file(tmp_path: Path) -> None:
    _write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    (tmp_path / "mine.yaml").write_text("kind: exact_match\ndata: rows.jsonl\n", encoding="utf-8")
    task = read_task(str(tmp_path / "mine.yaml"))
    assert task.name == "mine"
    assert len(load_rows(task, None)) == 1


def test_a_data_file_with_a_kind_before_it_is_a_task(tmp_path: Path) -> None:
    _write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    task = read_task(f"loss:{tmp_path / 'rows.jsonl'}")
    assert (task.kind, task.name) == ("loss", "rows")


@pytest.mark.parametrize(
    ("content", "what", "near"),
    [
        ("kind: exact_match\ndata: x.jsonl\nmax_new_token: 3\n", "unknown key 'max_new_token'", "max_new_tokens"),
        ("kind: exactmatch\ndata: x.jsonl\n", "input should be", ""),
        ("kind: exact_match\n", "a task needs rows", ""),
        ("- 1\n", "a task file is a map of keys", ""),
        ("kind: [\n", "the task file is not valid YAML", ""),
    ],
)
def test_a_wrong_task_file_is_one_clear_error(tmp_path: Path, content: str, what: str, near: str) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_task(str(path))
    assert caught.value.what.startswith(what)
    assert str(path) in caught.value.where
    assert caught.value.near == near


def test_an_unknown_task_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        read_task("crom")
    assert caught.value.near == "cron"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a", "completion": "b"}, "the row has no choices"),
        ({"prompt": "a", "completion": "b", "choices": ["c", "d"]}, "the answer is none of the choices"),
    ],
)
def test_rows_of_a_choice_task_are_checked_with_their_line(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    good = {"prompt": "a", "completion": "b", "choices": ["b", "c"]}
    _write_rows(tmp_path / "rows.jsonl", [good, row])
    with pytest.raises(DataError) as caught:
        load_rows(read_task(f"choice:{tmp_path / 'rows.jsonl'}"), None)
    assert caught.value.what == what
    assert caught.value.where.endswith("rows.jsonl:2")


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_lm_eval_tasks_need_the_extra() -> None:
    with pytest.raises(ConfigError) as caught:
        read_task("lm-eval:arc_easy")
    assert caught.value.fix == 'pip install "finetune-toolkit[eval]"'


def test_answers_of_lm_eval_are_read_with_their_standard_errors() -> None:
    found = {
        "results": {
            "arc_easy": {
                "alias": "arc_easy",
                "acc,none": 0.5,
                "acc_stderr,none": 0.01,
                "exact_match,strict-match": 0.25,
                "exact_match_stderr,strict-match": "N/A",
            }
        },
        "n-samples": {"arc_easy": {"original": 2376, "effective": 100}},
    }
    accuracy, exact = results_of(found)
    assert (accuracy.task, accuracy.metric, accuracy.n) == ("lm-eval:arc_easy", "acc", 100)
    assert (accuracy.low, accuracy.high) == pytest.approx((0.4804, 0.5196), abs=1e-4)
    assert exact.metric == "exact_match (strict-match)"
    assert exact.as_dict()["low"] is None
