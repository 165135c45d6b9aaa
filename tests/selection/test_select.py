"""A selection from recipe to subset: what it leaves, how it is gone on with, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
from rich.console import Console

import finetune
from finetune.config.load import load_recipe
from finetune.core.errors import ConfigError, DataError, FinetuneError, RefusedError
from finetune.core.shipped import shipped_names
from finetune.data_selection.engine.log import ScoreLog
from finetune.selection.run import SelectionResult, select
from support.chat_server import chat_server, completion
from support.pools import PAIRS
from support.tiny import save_tiny_model

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "every", "day", "at", "noon"]
ROWS = [
    {
        "instruction": f"{question} {number}",
        "output": " ".join([answer, *WORDS[: number % 9]]),
        "topic": "ab"[number % 2],
    }
    for number in range(4)
    for question, answer in PAIRS
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    save_tiny_model(folder / "model")
    lines = [json.dumps(row, separators=(", ", ":  ")) + "\n" for row in ROWS]
    (folder / "rows.jsonl").write_text("".join(lines))
    (folder / "recipe.yaml").write_text(
        f"model: {{name_or_path: {folder / 'model'}, dtype: float32, device: cpu}}\n"
        f"data: {{train: {folder / 'rows.jsonl'}}}\n"
        "select: {scorer: ifd, fraction: 0.25, batch_tokens: 128}\n"
        "output_dir: unset\n"
    )
    return folder


def run(workshop: Path, folder: Path, *overrides: str, **options: Any) -> SelectionResult:
    return select(load_recipe([str(workshop / "recipe.yaml")], [f"output_dir={folder}", *overrides]), **options)


def table(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / "scores.parquet").to_pylist()
    return rows


@pytest.fixture(scope="module")
def whole(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "selection"
    assert run(workshop, folder).exit_code == 0
    return folder


class TestWhatItLeaves:
    def test_the_subset_is_the_rows_of_highest_score_byte_for_byte(self, workshop: Path, whole: Path) -> None:
        rows = [row for row in table(whole) if not row["left_out"].startswith("the instruction does not")]
        best = sorted(rows, key=lambda row: -row["score"])[: len(ROWS) // 4]
        lines = (workshop / "rows.jsonl").read_text().splitlines(keepends=True)
        expected = [lines[row["line"] - 1] for row in sorted(best, key=lambda row: row["line"])]
        assert (whole / "selected" / "rows.jsonl").read_text() == "".join(expected)
        assert {row["line"] for row in table(whole) if row["kept"]} == {row["line"] for row in best}

    def test_the_scores_are_one_row_per_row_with_their_evidence(self, whole: Path) -> None:
        rows = table(whole)
        assert [row["row"] for row in rows] == list(range(len(ROWS)))
        assert sorted(row["rank"] for row in rows if row["kept"]) == list(range(1, len(ROWS) // 4 + 1))
        assert all(row["kept"] == (row["left_out"] == "") for row in rows)
        for row in rows:
            assert row["score"] == pytest.approx(2.718281828459045 ** (row["loss"] - row["loss_alone"]))

    def test_the_order_of_the_file_changes_no_score(self, workshop: Path, whole: Path, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(ROWS)))
        run(workshop, tmp_path / "out", f"data.train={tmp_path / 'rows.jsonl'}")
        one, other = ({row["key"]: row for row in table(folder)} for folder in (whole, tmp_path / "out"))
        assert one.keys() == other.keys()
        for key, row in one.items():
            assert other[key]["score"] == pytest.approx(row["score"], rel=1e-4)  # float32, in other batches
            assert other[key]["kept"] == row["kept"]

    def test_the_manifest_adds_up(self, whole: Path) -> None:
        manifest = json.loads((whole / "manifest.json").read_text())
        counts = manifest["counts"]
        assert counts["read"] == counts["scored"] == len(ROWS)
        assert counts["kept"] + sum(counts["left_out"].values()) == counts["scored"]
        assert counts["left_out"] == Counter(row["left_out"] for row in table(whole) if row["left_out"])
        assert manifest["tokens"]["kept"] == sum(row["tokens"] for row in table(whole) if row["kept"])
        assert all(manifest["models"].values())
        assert set(manifest["files"]) == {"scores.parquet", "dropped.jsonl", "selected/rows.jsonl"}

    def test_the_page_shows_both_ends_and_escapes_them(self, workshop: Path, tmp_path: Path) -> None:
        rows = [*ROWS, {"instruction": "<script>alert(1)</script>", "output": "<b>bold</b> " * 20, "topic": "a"}]
        (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run(workshop, tmp_path / "out", f"data.train={tmp_path / 'odd.jsonl'}", "select.scorer=length")
        page = (tmp_path / "out" / "report.html").read_text()
        assert "<script>" not in page
        assert "&lt;script&gt;" in page
        for part in ("Highest scores", "Lowest scores", "data:image/png;base64", "finetune train"):
            assert part in page

    def test_the_recipe_in_the_folder_trains_on_the_subset(self, whole: Path) -> None:
        loaded = load_recipe([str(whole / "select.yaml")], [f"data.train={whole / 'selected' / 'rows.jsonl'}"])
        assert loaded.recipe.select.scorer["name"] == "ifd"

    def test_rows_that_are_in_evaluation_data_are_left_out(self, workshop: Path, tmp_path: Path) -> None:
        long = next(row for row in ROWS if len(str(row["output"]).split()) >= 13)
        (tmp_path / "test.jsonl").write_text(json.dumps({"question": "?", "answer": [long["output"]]}) + "\n")
        evaluation = f"select.decontaminate=[{tmp_path / 'test.jsonl'}]"
        run(workshop, tmp_path / "out", "select.scorer=random", "select.fraction=1", evaluation)
        left_out = {row["line"] for row in table(tmp_path / "out") if "evaluation text" in row["left_out"]}
        run_of_13 = " ".join(str(long["output"]).replace(",", "").split()[:13])
        sharing = {line for line, row in enumerate(ROWS, 1) if run_of_13 in str(row["output"]).replace(",", "")}
        assert left_out >= sharing >= {ROWS.index(long) + 1}
        with pytest.raises(DataError, match="does not exist") as caught:
            run(workshop, tmp_path / "other", "select.decontaminate=[tests.jsonl]", dry_run=True)
        assert "tests.jsonl" in caught.value.where

    def test_several_sources_and_their_shares(self, workshop: Path, tmp_path: Path) -> None:
        for name, rows in (("a", ROWS[:20]), ("b", ROWS[20:])):
            (tmp_path / name).mkdir()
            (tmp_path / name / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = json.dumps([str(tmp_path / name / "rows.jsonl") for name in "ab"])
        shares = ["select.scorer=random", "select.fraction=null", "select.top=10", "select.per_source=equal"]
        run(workshop, tmp_path / "out", f"data.train={sources}", *shares)
        subsets = sorted((tmp_path / "out" / "selected").iterdir())
        assert [subset.name for subset in subsets] == ["1-rows.jsonl", "2-rows.jsonl"]
        assert [len(subset.read_text().splitlines()) for subset in subsets] == [5, 5]

    def test_duplicates_and_rows_too_alike_are_left_out(self, workshop: Path, tmp_path: Path) -> None:
        rows = [*ROWS[:6], ROWS[0], {**ROWS[1], "output": f"  {ROWS[1]['output'].upper()}"}]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rules = ["select.scorer=length", "select.fraction=1.0", "select.duplicates=exact", "select.diversity=0.999999"]
        rules.append(f"data.train={tmp_path / 'rows.jsonl'}")
        run(workshop, tmp_path / "out", *rules)
        reasons = Counter(row["left_out"] for row in table(tmp_path / "out") if not row["kept"])
        assert reasons == {"the same as a row that ranks higher": 2}
        run(
            workshop,
            tmp_path / "out",
            f"data.train={tmp_path / 'rows.jsonl'}",
            *rules[:3],
            "select.diversity=0.1",
            resume=True,
        )
        assert (
            Counter(row["left_out"] for row in table(tmp_path / "out"))["too similar to a row that ranks higher"] >= 1
        )

    def test_a_column_may_say_where_a_row_is_from(self, workshop: Path, tmp_path: Path) -> None:
        run(workshop, tmp_path, "select.scorer=length", "select.per_source=equal", "select.source_column=topic")
        kept = [ROWS[row["row"]]["topic"] for row in table(tmp_path) if row["kept"]]
        assert Counter(kept) == {"a": 4, "b": 3}


class TestFromPython:
    def test_a_data_set_comes_back_with_the_rows_of_the_recipe(
        self, workshop: Path, whole: Path, tmp_path: Path
    ) -> None:
        rows = datasets.Dataset.from_list(ROWS)
        model = {"name_or_path": str(workshop / "model"), "dtype": "float32", "device": "cpu"}
        options = {"model": model, "fraction": 0.25, "batch_tokens": 128, "output_dir": tmp_path / "kept"}
        kept = finetune.select(rows, "ifd", **options)
        assert kept.column_names == rows.column_names
        assert kept.to_list() == [ROWS[row["row"]] for row in table(whole) if row["kept"]]
        manifest = json.loads((tmp_path / "kept" / "manifest.json").read_text())
        again = finetune.select(rows, "ifd", **{**options, "fraction": 0.5})
        assert len(again) == 2 * len(kept)
        assert json.loads((tmp_path / "kept" / "manifest.json").read_text())["measured_now"] == 0
        assert manifest["measured_now"] == len(ROWS)

    def test_a_misspelt_rule_is_answered(self) -> None:
        with pytest.raises(ConfigError) as caught:
            finetune.select(datasets.Dataset.from_list(ROWS), "random", model="m", fractoin=0.1)
        assert caught.value.near == "select.fraction"


class TestForTraining:
    RECIPE = ("data.selection=true", "method=lora", "train.max_steps=2", "train.per_device_train_batch_size=2")

    def test_a_run_trains_on_the_rows_that_are_kept(self, workshop: Path, whole: Path, tmp_path: Path) -> None:
        from finetune.training.run import train

        loaded = load_recipe([str(workshop / "recipe.yaml")], [f"output_dir={tmp_path / 'run'}", *self.RECIPE])
        record = train(loaded).record
        assert record["data"]["examples"] == len(ROWS) // 4
        subset = tmp_path / "run-selection" / "selected" / "rows.jsonl"
        assert subset.read_bytes() == (whole / "selected" / "rows.jsonl").read_bytes()
        resumable = load_recipe([str(tmp_path / "run")])
        assert not resumable.recipe.data.selection
        assert resumable.recipe.data.train[0].path == str(subset)

    @pytest.mark.multi_process
    def test_two_processes_select_and_train_together(self, workshop: Path, tmp_path: Path) -> None:
        arguments = ["train", str(workshop / "recipe.yaml"), f"output_dir={tmp_path / 'run'}", *self.RECIPE]
        command = [sys.executable, "-m", "finetune", *arguments, "--nproc", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        assert (record["world_size"], record["data"]["examples"]) == (2, len(ROWS) // 4)


class TestGoingOn:
    def test_killed_and_gone_on_with_it_scores_nothing_twice_and_everything_the_same(
        self, workshop: Path, whole: Path, tmp_path: Path
    ) -> None:
        """The process is killed by ``kill -9`` as soon as its log has a first batch."""
        folder = tmp_path / "out"
        command = [sys.executable, "-m", "finetune", "select", str(workshop / "recipe.yaml"), f"output_dir={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 60
            while process.poll() is None and not any(b"\n" in log.read_bytes() for log in folder.glob("log/*.jsonl")):
                assert time.monotonic() < deadline
            process.send_signal(signal.SIGKILL)
        log = folder / "log" / "0.jsonl"
        before = log.read_bytes()
        # Half a line at the end is what a kill in the middle of a write leaves.
        log.write_bytes(before[: before.index(b"\n") + 1] + b'{"model":0,"batch":1,"rows":{"')
        kept = ScoreLog(folder / "log").read()
        result = run(workshop, folder, resume=True)
        assert result.manifest["measured_now"] == len(ROWS) - sum(map(len, kept.values()))
        assert log.read_bytes() == (whole / "log" / "0.jsonl").read_bytes()
        assert table(folder) == table(whole)

    def test_a_signal_ends_it_with_the_command_to_go_on(self, workshop: Path, tmp_path: Path) -> None:
        folder = tmp_path / "out"
        command = [sys.executable, "-m", "finetune", "select", str(workshop / "recipe.yaml"), f"output_dir={folder}"]
        with subprocess.Popen([*command, "select.batch_tokens=1"], stderr=subprocess.PIPE, text=True) as process:
            deadline = time.monotonic() + 60
            while process.poll() is None and not any(b"\n" in log.read_bytes() for log in folder.glob("log/*.jsonl")):
                assert time.monotonic() < deadline
            process.send_signal(signal.SIGTERM)
            said = process.communicate()[1]
        assert process.returncode == 130, said
        assert f"finetune select {folder / 'select.yaml'} --resume" in said
        assert run(workshop, folder, "select.batch_tokens=1", resume=True).exit_code == 0

    def test_other_limits_choose_anew_without_a_model(self, workshop: Path, tmp_path: Path) -> None:
        run(workshop, tmp_path)
        again = run(workshop, tmp_path, "select.fraction=0.5", "select.scorer={name: ifd, metric: loss}", resume=True)
        assert again.manifest["measured_now"] == 0
        assert again.manifest["counts"]["kept"] == len(ROWS) // 2

    def test_what_was_scored_in_another_way_is_not_gone_on_with(self, workshop: Path, tmp_path: Path) -> None:
        run(workshop, tmp_path)
        before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        for override, part in [
            ("select.scorer=loss", "another scorer"),
            ("model.dtype=bfloat16", "another dtype"),
            ("data.system=Be brief.", "another data"),
            ("select.batch_tokens=64", "another batch_tokens"),
        ]:
            with pytest.raises(RefusedError, match=part):
                run(workshop, tmp_path, override, resume=True)
        with pytest.raises(RefusedError, match="an earlier selection"):
            run(workshop, tmp_path)
        assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before

    def test_another_model_under_the_same_name_is_noticed(self, workshop: Path, tmp_path: Path) -> None:
        model = save_tiny_model(tmp_path / "model")
        run(workshop, tmp_path / "out", f"model.name_or_path={model}")
        (tmp_path / "out" / "log" / "0.jsonl").unlink()
        save_tiny_model(tmp_path / "model", seed=1)
        with pytest.raises(RefusedError, match="not the one that scored"):
            run(workshop, tmp_path / "out", f"model.name_or_path={model}", resume=True)

    @pytest.mark.multi_process
    @pytest.mark.parametrize("scorer", ["ifd", "less"])
    def test_two_processes_leave_the_same_files_as_one(self, scorer: str, workshop: Path, tmp_path: Path) -> None:
        (tmp_path / "target.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
        less = f"{{name: less, target: [{tmp_path / 'target.jsonl'}], r: 2, lora_alpha: 4, warmup_epochs: 2}}"
        override = f"select.scorer={less if scorer == 'less' else scorer}"
        run(workshop, tmp_path / "one", override)
        arguments = ["select", str(workshop / "recipe.yaml"), override, f"output_dir={tmp_path / 'two'}"]
        command = [sys.executable, "-m", "finetune", *arguments, "--nproc", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert sorted(file.name for file in (tmp_path / "two" / "log").iterdir()) == ["0.jsonl", "1.jsonl"]
        for name in ("scores.parquet", "selected/rows.jsonl"):
            assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


@pytest.mark.real
@pytest.mark.parametrize("name", [name for name in shipped_names("recipe") if name.startswith("select/")])
def test_every_shipped_recipe_passes_a_dry_run(name: str, tmp_path: Path) -> None:
    result = select(load_recipe([name], [f"output_dir={tmp_path / 'out'}"]), dry_run=True)
    assert result.status == "planned"


class TestWhatItRefuses:
    @pytest.mark.parametrize(
        ("overrides", "error", "parts"),
        [
            (["select.fraction=0"], ConfigError, ["select.fraction", "more than 0"]),
            (["select.fraction=1.2"], ConfigError, ["select.fraction", "at most 1"]),
            (["select.fraction=null"], ConfigError, ["how many rows", "select.fraction=0.2"]),
            (["select.scorer=idf"], FinetuneError, ["unknown scorer", "near ifd"]),
            (["select.scorer.metrik=loss"], ConfigError, ["near select.scorer.metric"]),
            (
                ["data.train=[{path: shipped:quickstart/train.jsonl, weight: 2}]"],
                ConfigError,
                ["data.train.0.weight=1"],
            ),
            (["select.source_column=topik", "select.per_source=equal"], DataError, ["near topic"]),
            (["select.threshold=99"], DataError, ["no row is kept"]),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else None,
    )
    def test_bad_keys_are_answered(
        self, overrides: list[str], error: type[FinetuneError], parts: list[str], workshop: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(error) as caught:
            run(workshop, tmp_path / "out", *overrides)
        for part in parts:
            assert part in str(caught.value)

    def test_rows_without_answers_are_refused_before_anything_is_written(self, workshop: Path, tmp_path: Path) -> None:
        (tmp_path / "text.jsonl").write_text('{"text": "Paris is a city."}\n' * 3)
        with pytest.raises(DataError) as caught:
            run(workshop, tmp_path / "out", f"data.train={tmp_path / 'text.jsonl'}")
        assert caught.value.where.endswith("text.jsonl:1")
        assert not (tmp_path / "out").exists()

    def test_a_judge_that_judges_nothing_is_shown_with_what_it_says(self, workshop: Path, tmp_path: Path) -> None:
        with chat_server(lambda content: completion("I cannot help.")) as (url, _):
            judge = f"select.scorer={{name: judge, endpoint: {json.dumps(url)}, model: m, cache: false}}"
            with pytest.raises(DataError, match="no row has a score") as caught:
                run(workshop, tmp_path / "out", judge)
        assert caught.value.got == f"{len(ROWS)} the judge gave no rating ('I cannot help.')"

    def test_files_of_something_else_are_left_alone(self, workshop: Path, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(RefusedError, match="not a selection's"):
            run(workshop, tmp_path, overwrite=True)
        assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]

    def test_a_dry_run_writes_nothing_and_says_what_would_be_done(self, workshop: Path, tmp_path: Path) -> None:
        said = StringIO()
        less = f"select.scorer={{name: less, target: [{workshop / 'rows.jsonl'}]}}"
        options: dict[str, Any] = {"dry_run": True, "console": Console(file=said, width=200)}
        assert run(workshop, tmp_path / "out", less, **options).status == "planned"
        assert f"model    {workshop / 'model'}, 4 times\n" in said.getvalue()
        assert not (tmp_path / "out").exists()

    def test_rows_that_do_not_fit_are_dropped_and_counted(self, workshop: Path, tmp_path: Path) -> None:
        cut = ["data.max_length=60", "data.max_dropped=0.9"]
        result = run(workshop, tmp_path, "select.scorer=length", *cut)
        dropped = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
        assert {row["reason"] for row in dropped} == {"longer than data.max_length"}
        assert result.manifest["counts"]["dropped"] == {"longer than data.max_length": len(dropped)}
        assert len(table(tmp_path)) == len(ROWS) - len(dropped)
