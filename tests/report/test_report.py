"""The page and the card of made-up runs: complete, interrupted, without evaluation, without metrics."""

from __future__ import annotations

import copy
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from finetune.core.errors import CheckpointError
from finetune.report.figures import bytes_in_words, seconds_in_words, share_in_words
from finetune.report.model_card import write_model_card
from finetune.report.page import write_report
from finetune.report.record import command_of, next_commands
from finetune.report.results import compare_results, compare_samples

NASTY = "<script>alert('x')</script> & \"quoted\" {{ 7 * 7 }}"


def result(
    value: float, low: float | None, high: float | None, answers: dict[str, str], **fields: Any
) -> dict[str, Any]:
    samples = [
        {
            "id": key,
            "prompt": f"ask {key}",
            "expected": "right",
            "output": text,
            "correct": text == "right",
            "group": "",
        }
        for key, text in answers.items()
    ]
    base = {"task": "cron", "metric": "exact_match", "value": value, "n": 300, "low": low, "high": high, "groups": {}}
    return {**base, "samples": samples, **fields}


def complete_record() -> dict[str, Any]:
    return {
        "status": "completed",
        "started": "2026-12-01T09:00:00+00:00",
        "ended": "2026-12-01T09:05:00+00:00",
        "seconds": 251.3,
        "argv": ["/x/bin/finetune", "train", "quickstart", "output_dir=a b"],
        "finetune": {"version": "0.1.0", "commit": "abc1234", "dirty": False},
        "versions": {"torch": "2.13.0"},
        "device": {"type": "cpu", "name": "cpu", "threads": 2},
        "world_size": 1,
        "seed": 42,
        "model": {"name_or_path": "owner/name", "dtype": "float32", "parameters": 134515008, "tied": True},
        "method": {
            "name": "lora",
            "config": {"r": 8, "target": NASTY},
            "paper": "arXiv 2106.09685",
            "kind": "adapter",
            "stock": True,
            "trained": 2442240,
            "total": 134515008,
            "share": 2442240 / 134515008,
            "chosen": [NASTY],
        },
        "data": {"examples": 3000, "tokens": 1000, "label_tokens": 250, "dropped": {"too long": 12}, "example": NASTY},
        "plan": {"steps": 188, "epochs": 1.0, "per_device_batch": 16, "accumulation": 1, "world_size": 1},
        "memory": {
            "estimate_bytes": {"weights": 600, "activations": 200, "gradients": 0, "peak": 800},
            "measured_peak_bytes": 1000,
            "base_bytes": 400,
            "saved_bytes": 8,
        },
        "final": {"loss": 0.0712, "eval_loss": None},
        "evaluation": {
            "before": [result(0.01, 0.0, 0.03, {"a": NASTY, "b": "wrong"}, groups={"seen": [0.02, 150]})],
            "after": [
                result(0.91, 0.87, 0.94, {"a": "right", "b": "also wrong"}, groups={"seen": [0.98, 150]}),
                result(0.08, None, None, {}, task="held out", metric="loss"),
            ],
        },
        "samples": [],
        "config_resolved": "seed: 42\n",
        "warnings": [f"a warning {NASTY}"],
        "error": None,
    }


def write_run(folder: Path, record: dict[str, Any], *, metrics: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    (folder / "config.resolved.yaml").write_text(f"output_dir: {NASTY}\n", encoding="utf-8")
    if metrics:
        lines = [
            json.dumps({"step": s, "loss": 3 * math.exp(-s / 40), "lr": 1e-3, "tokens": 700 * s, "mem_peak_gb": 1.5})
            for s in range(5, 105, 5)
        ]
        lines.insert(10, json.dumps({"step": 50, "eval_loss": 1.2}))
        # A killed run may leave half a line.
        (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 105, "lo', encoding="utf-8")
    return folder


class Page(HTMLParser):
    """What a browser would make of a page: elements, what they load, and their text."""

    VOID = frozenset({"meta", "link", "img", "br", "hr", "input", "path", "use", "rect"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        found = dict(attrs)
        self.loads += [str(found[key]) for key in ("src", "href", "xlink:href", "data", "poster") if key in found]
        self.ids += [str(found["id"])] if "id" in found else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_self_contained(page: Page) -> None:
    assert not page.open
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert all(target.startswith("#") for target in page.loads)
    assert not re.findall(r"(?:https?:)?//\w", page.source)
    assert "@import" not in page.source
    assert len(page.ids) == len(set(page.ids))


def test_complete_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "my run", complete_record())
    path = write_report(run)
    assert path == run / "report.html"
    page = Page(path)
    check_self_contained(page)
    assert page.tags.count("svg") == 3  # loss, learning rate, memory
    for text in ("1.0 %", "91.0 %", "87.0 % to 94.0 %", "+90.0 points", "4 min 11 s", "2.4 M", "1.25 of the estimate"):
        assert text in page.text
    assert page.text.count(NASTY) == 6  # config value, chosen, example, resolved recipe, base's answer, warning
    assert f"finetune chat '{run}'" in page.text
    # Both bars share one scale, that of the larger peak: 600 of 1000, and the whole.
    assert "width:60.0%" in page.source
    assert "width:100.0%" in page.source


def test_interrupted_run(tmp_path: Path) -> None:
    record = complete_record()
    record |= {"status": "interrupted", "final": {"loss": None, "eval_loss": None}}
    record["evaluation"] = {"before": record["evaluation"]["before"], "after": []}
    record["memory"] |= {"measured_peak_bytes": None, "saved_bytes": None}
    run = write_run(tmp_path / "run", record)
    (run / "checkpoint-66").mkdir()
    page = Page(write_report(run))
    check_self_contained(page)
    assert "interrupted" in page.text
    assert f"finetune train {run}/config.resolved.yaml --resume" in page.text
    assert "measured peak" not in page.text
    assert "finetune chat" not in page.text


def test_failed_run_says_why_and_needs_nothing_else(tmp_path: Path) -> None:
    record = {"status": "failed", "error": f"loss is not finite {NASTY}"}
    run = write_run(tmp_path / "run", record, metrics=False)
    page = Page(write_report(run))
    check_self_contained(page)
    assert f"loss is not finite {NASTY}" in page.text
    assert "svg" not in page.tags
    assert "None" not in page.text
    assert "--overwrite" in page.text


def test_run_without_evaluation(tmp_path: Path) -> None:
    record = complete_record()
    record["evaluation"] = {"before": [], "after": []}
    page = Page(write_report(write_run(tmp_path / "run", record)))
    check_self_contained(page)
    assert "Evaluation" not in page.text
    assert "Answers before and after" not in page.text
    assert page.tags.count("svg") == 3


def test_run_without_metrics(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path / "run", complete_record(), metrics=False)))
    check_self_contained(page)
    assert "svg" not in page.tags
    assert "nothing to draw" in page.text


@pytest.mark.parametrize("content", [None, '{"status": ', "[1]"])
def test_folder_that_is_no_run(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError) as raised:
        write_report(tmp_path)
    assert str(tmp_path) in raised.value.where
    assert not (tmp_path / "report.html").exists()


def test_results_are_compared_by_task_metric_and_group() -> None:
    rows = compare_results(complete_record()["evaluation"])
    assert [(row.task, row.metric, row.group) for row in rows] == [
        ("cron", "exact_match", ""),
        ("cron", "exact_match", "seen"),
        ("held out", "loss", ""),
    ]
    assert rows[0].better is True
    assert rows[1].n == 150
    assert (rows[2].before, rows[2].share, rows[2].better) == (None, False, None)


def test_smaller_loss_is_better() -> None:
    before, after = (result(value, None, None, {}, metric="loss") for value in (2.0, 1.5))
    (row,) = compare_results({"before": [before], "after": [after]})
    assert (row.change, row.better) == ("−0.500", True)


def test_samples_are_joined_by_id_or_taken_as_given() -> None:
    record = complete_record()
    first, second = compare_samples(record)
    assert (first.before, first.after, first.before_correct, first.after_correct) == (NASTY, "right", False, True)
    assert (second.before, second.after_correct) == ("wrong", False)
    record["samples"] = [{"prompt": "p", "expected": "e", "before": "x", "after": "e "}]
    (given,) = compare_samples(record)
    assert (given.before_correct, given.after_correct) == (False, True)


def test_command_can_be_typed_again() -> None:
    assert command_of(complete_record()) == "finetune train quickstart 'output_dir=a b'"
    assert command_of({"argv": ["my script.py", "--x"]}) == "python 'my script.py' --x"
    assert command_of({}) == ""


def test_next_commands_quote_the_folder(tmp_path: Path) -> None:
    commands = [line for line, _ in next_commands(tmp_path / "my run", {"status": "completed"})]
    assert commands[2] == f"finetune merge '{tmp_path}/my run' '{tmp_path}/my run-merged'"


def front_matter(card: str) -> dict[str, Any]:
    _, head, _ = card.split("---\n", 2)
    loaded: dict[str, Any] = YAML(typ="safe").load(head)
    return loaded


def test_model_card_of_an_adapter(tmp_path: Path) -> None:
    path = write_model_card(tmp_path, complete_record())
    card = path.read_text(encoding="utf-8")
    assert path.name == "README.md"
    assert front_matter(card) == {
        "base_model": "owner/name",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["finetune-toolkit", "lora"],
    }
    titles = re.findall(r"^## (.*)$", card, re.MULTILINE)
    assert titles == ["Load", "Data", "Method", "Training", "Results", "Limits", "Reproduce", "Versions"]
    assert "| cron | exact_match | 300 | 1.0 % [0.0 % to 3.0 %] | 91.0 % [87.0 % to 94.0 %] |" in card
    assert "license" not in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code is not None
    compile(code.group(1), "card", "exec")


def test_model_card_of_a_bundled_base_in_place(tmp_path: Path) -> None:
    record = copy.deepcopy(complete_record())
    record["model"]["name_or_path"] = "bundled:smollm2-135m-instruct"
    record["method"] |= {"name": "s2ft", "kind": "delta"}
    card = write_model_card(tmp_path, record).read_text(encoding="utf-8")
    assert "base_model" not in front_matter(card)
    assert 'finetune.load("bundled:smollm2-135m-instruct", folder)' in card


def test_model_card_says_only_what_was_measured(tmp_path: Path) -> None:
    card = write_model_card(tmp_path, {"method": {"name": "s2ft"}}).read_text(encoding="utf-8")
    assert "None" not in card
    assert "## Results" not in card
    assert "No task was evaluated" in card


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "–"), (0, "0 bytes"), (1_610_000_000, "1.61 GB"), (26_500_000, "26.5 MB"), (999, "999 bytes")],
)
def test_bytes_in_words(size: int | None, text: str) -> None:
    assert bytes_in_words(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (4.25, "4.2 s"), (59.6, "1 min 00 s"), (842, "14 min 02 s"), (11100, "3 h 05 min")],
)
def test_seconds_in_words(seconds: float | None, text: str) -> None:
    assert seconds_in_words(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0.0 %"), (1.0, "100.0 %"), (0.00789, "0.79 %"), (0.00012, "0.0120 %")]
)
def test_share_in_words(share: float, text: str) -> None:
    assert share_in_words(share) == text
