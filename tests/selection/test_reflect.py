"""Selective reflection from recipe to file, with a teacher behind a server of our own and one on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest

import finetune
from finetune.config.load import load_recipe
from finetune.core.errors import ConfigError, DataError, RefusedError
from finetune.data.records import Message
from finetune.data_selection import build_scorer
from finetune.data_selection.engine.rater import Rater
from finetune.data_selection.pool import Exchange
from finetune.data_selection.reflection.choice import ORIGINS, VersionScores, excluded, preferred
from finetune.models import load_model, load_tokenizer
from finetune.selection.reflect import reflect
from finetune.selection.run import SelectionResult
from support.chat_server import chat_server, completion
from support.pools import PAIRS, conversation, examples
from support.tiny import save_tiny_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    save_tiny_model(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    # A teacher reads more than the 512 tokens of the tiny model; rotary positions have no table to outgrow.
    (folder / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    rows: list[dict[str, Any]] = [{"instruction": asked, "output": said} for asked, said in PAIRS]
    rows.append({"instruction": "And?", "output": "No.", "history": [["Is it?", "It may be."]]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(workshop: Path, out: Path, url: str | None, *overrides: str, **options: Any) -> SelectionResult:
    teacher = [] if url is None else [f"reflect.endpoint={url}", "reflect.model=teacher", "reflect.attempts=1"]
    given = [
        f"model.name_or_path={workshop / 'model'}",
        "model.dtype=float32",
        f"data.train={workshop / 'rows.jsonl'}",
        f"output_dir={out}",
        *teacher,
        *overrides,
    ]
    return reflect(load_recipe([], given), **options)


def pair_in(content: dict[str, Any]) -> Exchange:
    """Reads the pair that a request is about."""
    text = content["messages"][-1]["content"]
    _, _, rest = text.partition("[Given instruction]\n")
    instruction, _, rest = rest.partition("\n\n[Given answer]\n")
    return Exchange(instruction, rest.partition("\n\nFirst criticise")[0].partition("\n\nCriticise")[0])


def teach(content: dict[str, Any]) -> Any:
    """A teacher whose rewriting can be foretold; some of its answers are malformed."""
    pair, about = pair_in(content), content["messages"][-1]["content"]
    if "[Better answer]" in about:
        nonsense = pair.instruction.startswith("Who")
        return completion("I will not." if nonsense else f"[Better answer]\n{better(pair)}\n[End of Better answer]")
    if pair.instruction.startswith("Over"):
        return completion("[New instruction]\nonly half")
    return completion(f"[New instruction]\n{harder(pair).instruction}\n[New answer]\n{harder(pair).answer}")


def better(pair: Exchange) -> str:
    return f"{pair.answer} the quick brown fox"


def harder(pair: Exchange) -> Exchange:
    return Exchange(f"{pair.instruction} every day at noon", f"{pair.answer} over the lazy dog")


def scored(workshop: Path, pair: Exchange) -> VersionScores:
    """Scores one version by itself."""
    rater = Rater(load_model(str(workshop / "model"), dtype="float32"), load_tokenizer(str(workshop / "model")))
    (example,) = examples(rater.tokenizer, [(pair.instruction, pair.answer)])
    values = []
    for name in ("ifd", "r_ifd"):
        scorer = build_scorer({"name": name})
        values.append(scorer.score(example, scorer.measure(rater, [example])[0]).value)  # type: ignore[arg-type]
    return VersionScores(*values)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "selected" / "reflected.jsonl").read_text().splitlines()]


def expected_of(workshop: Path, asked: str, said: str) -> tuple[str, Sequence[str]] | None:
    """Works out which version of a row is kept, one version at a time."""
    given = Exchange(asked, said)
    pairs: dict[Any, Exchange] = {"original": given}
    if not asked.startswith("Over"):
        pairs["instruction"] = harder(given)
        if not asked.startswith("Who"):
            pairs["both"] = Exchange(harder(given).instruction, better(harder(given)))
    if not asked.startswith("Who"):
        pairs["response"] = Exchange(asked, better(given))
    scores = {origin: scored(workshop, pair) for origin, pair in pairs.items()}
    origin = preferred(scores)
    if excluded(origin, scores[origin], keep="all"):
        return None
    return origin, (pairs[origin].instruction, pairs[origin].answer)


def test_every_row_has_the_version_that_the_student_prefers_and_its_origin(workshop: Path, tmp_path: Path) -> None:
    with chat_server(teach) as (url, requests):
        result = run(workshop, tmp_path / "out", url, "reflect.keep=all")
    assert result.exit_code == 0
    # Three questions about each pair, but no second one where the new instruction came to nothing.
    assert len(requests) == 3 * len(PAIRS) - 1
    expected = [found for asked, said in PAIRS if (found := expected_of(workshop, asked, said))]
    kept = [
        (row["origin"], tuple(message["content"] for message in row["messages"])) for row in lines(tmp_path / "out")
    ]
    assert kept == expected
    assert [row["line"] for row in lines(tmp_path / "out")] == sorted(row["line"] for row in lines(tmp_path / "out"))
    counts = result.manifest["counts"]
    assert counts["read"] == len(PAIRS) + 1 == sum(counts["kept"].values()) + sum(counts["left_out"].values())
    assert counts["left_out"]["not one instruction with one answer"] == 1
    assert counts["reflections"]["instruction"] == {"ok": len(PAIRS) - 1, "no marker": 1}
    assert counts["reflections"]["response"] == {"ok": len(PAIRS) - 1, "no marker": 1}
    assert result.manifest["spent"]["prompt_tokens"] == 7 * len(requests)
    table = pyarrow.parquet.read_table(tmp_path / "out" / "scores.parquet").to_pylist()
    assert len(table) == len(PAIRS) + 1
    loaded = load_recipe([str(tmp_path / "out" / "select.yaml")], [])
    assert loaded.recipe.reflect.model == "teacher"


def test_the_page_shows_originals_beside_what_is_kept(workshop: Path, tmp_path: Path) -> None:
    rows = [{"instruction": asked, "output": said} for asked, said in PAIRS]
    rows += [{"instruction": "Write <script>alert(1)</script>.", "output": "every day " * 200}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with chat_server(teach) as (url, _):
        overrides = [f"data.train={tmp_path / 'rows.jsonl'}", "reflect.keep=all", "data.max_length=300"]
        overrides += ["data.max_dropped=0.5", "reflect.answer_price=2"]
        result = run(workshop, tmp_path / "out", url, *overrides)
    page = (tmp_path / "out" / "report.html").read_text()
    counts = result.manifest["counts"]
    assert counts["dropped"] == {"longer than data.max_length": 1}
    assert sum(counts["kept"].values()) + sum(counts["left_out"].values()) + 1 == counts["read"]
    rewritten = [row for row in lines(tmp_path / "out") if row["origin"] != "original"]
    assert rewritten
    by_line = dict(enumerate(rows, 1))
    for row in rewritten:
        given = by_line[row["line"]]
        before, after = (f"<strong>{text}</strong>" for text in (given["instruction"], row["messages"][0]["content"]))
        assert page.index(before) < page.index(after) or before == after
        for text in (given["output"], row["messages"][1]["content"], f"r-IFD {row['r_ifd']:.3g}"):
            assert text in page
    for reason, count in {**counts["dropped"], **counts["left_out"]}.items():
        assert f"<tr><td>{reason}</td><td>{count}</td></tr>" in page
    for origin, count in counts["kept"].items():
        assert f"<tr><td>{origin}</td><td>{count}</td>" in page
    for part in ("data:image/png;base64", f"cost {result.manifest['spent']['cost']:.4g}", "finetune train"):
        assert part in page
    (dropped,) = (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()
    assert json.loads(dropped)["line"] == len(rows)


def test_a_data_set_comes_back_with_the_rows_of_the_recipe(workshop: Path, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"instruction": asked, "output": said} for asked, said in PAIRS])
    model = {"name_or_path": str(workshop / "model"), "dtype": "float32"}
    with chat_server(teach) as (url, requests):
        run(workshop, tmp_path / "recipe", url, "reflect.keep=all")
        asked = len(requests)
        teacher = {"endpoint": url, "model": "teacher"}
        found = finetune.reflect(rows, model=model, teacher=teacher, keep="all", output_dir=tmp_path / "out")
        assert len(requests) == asked  # from the cache
    expected = [{k: row[k] for k in ("messages", "origin", "id", "ifd", "r_ifd")} for row in lines(tmp_path / "recipe")]
    assert found.to_list() == expected
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.multi_process
def test_two_processes_leave_the_same_files_as_one(workshop: Path, tmp_path: Path) -> None:
    with chat_server(teach) as (url, requests):
        options = ["reflect.keep=all", "reflect.cache=false", "select.batch_tokens=100"]
        run(workshop, tmp_path / "one", url, *options)
        arguments = ["reflect", str(tmp_path / "one" / "select.yaml"), f"output_dir={tmp_path / 'two'}", "--nproc", "2"]
        command = [sys.executable, "-m", "finetune", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert len(requests) == 2 * (3 * len(PAIRS) - 1)
    logs = [file.name for file in (tmp_path / "two" / "log" / "teacher").iterdir()]
    assert sorted(logs) == ["0.jsonl", "1.jsonl"]
    for name in ("scores.parquet", "selected/reflected.jsonl"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_goes_on_where_it_stopped_and_asks_nothing_twice(workshop: Path, tmp_path: Path) -> None:
    broken = True

    def reply(content: dict[str, Any]) -> Any:
        return (500, {}, b"") if broken and "Name a dog." in content["messages"][-1]["content"] else teach(content)

    with chat_server(reply) as (url, requests):
        first = run(workshop, tmp_path / "out", url, "reflect.keep=all", "select.batch_tokens=1")
        assert first.exit_code == 1
        assert first.manifest["counts"]["left_out"]["the endpoint did not answer"] == 1
        broken, asked = False, len(requests)
        second = run(workshop, tmp_path / "out", url, "reflect.keep=all", "select.batch_tokens=1", resume=True)
        assert second.exit_code == 0
        assert len(requests) == asked + 3
        # The teacher was asked about one row; its versions are new to the student, who then measures all.
        versions = pyarrow.parquet.read_table(tmp_path / "out" / "scores.parquet").to_pylist()
        scored = sum(row[f"ifd_{origin}"] is not None for row in versions for origin in ORIGINS)
        assert second.manifest["measured_now"] == 1 + 2 * scored
        third = run(workshop, tmp_path / "out", url, "select.batch_tokens=1", resume=True)
        assert third.manifest["measured_now"] == 0
        assert set(third.manifest["counts"]["kept"]) <= {"response", "both"}
        run(workshop, tmp_path / "out", url, "reflect.keep=all", "select.batch_tokens=1", resume=True)
        with pytest.raises(RefusedError, match="another scorer"):
            run(workshop, tmp_path / "out", url, "reflect.max_new_tokens=5", "select.batch_tokens=1", resume=True)
        with pytest.raises(RefusedError, match="earlier selection"):
            run(workshop, tmp_path / "out", url)
        whole = run(workshop, tmp_path / "whole", url, "reflect.keep=all", "select.batch_tokens=1")
        assert whole.manifest["spent"]["from_cache"] == 3 * len(PAIRS) - 1
    assert (tmp_path / "whole" / "selected" / "reflected.jsonl").read_bytes() == (
        tmp_path / "out" / "selected" / "reflected.jsonl"
    ).read_bytes()


def test_a_teacher_on_this_machine_that_writes_nothing_of_use_leaves_the_originals(
    workshop: Path, tmp_path: Path
) -> None:
    options = ["reflect.max_new_tokens=4", "reflect.keep=all"]
    result = run(workshop, tmp_path / "out", None, *options)
    assert set(result.manifest["counts"]["kept"]) == {"original"}
    by_question = dict(PAIRS)
    for row in lines(tmp_path / "out"):
        asked, said = (Message(**message).content for message in row["messages"])
        assert by_question[asked] == said
    with pytest.raises(DataError, match="no version is kept") as caught:
        run(workshop, tmp_path / "other", None, "reflect.max_new_tokens=4")
    assert "no answer of the teacher fits better" in caught.value.got


def test_what_is_wrong_with_the_teacher_is_said_before_anything_starts(workshop: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(workshop, tmp_path / "out", None, "reflect.endpoint=localhost:8000", dry_run=True)
    assert caught.value.where == "reflect.endpoint"
    assert not (tmp_path / "out").exists()


def test_plain_text_is_refused_without_talk_of_scorers(workshop: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "Paris is a city."}\n')
    with pytest.raises(DataError, match="reflect needs instructions") as caught:
        run(workshop, tmp_path / "out", None, f"data.train={tmp_path / 'text.jsonl'}", dry_run=True)
    assert caught.value.want == "rows with an instruction and an answer"


@pytest.mark.parametrize(
    ("reply", "got", "fix"),
    [
        ((500, {}, b""), "7 the endpoint did not answer (HTTP 500, 1 attempts)", "--resume"),
        ((200, {}, b"<html>"), "7 the endpoint's answer is no chat completion", "another teacher"),
    ],
)
def test_a_teacher_that_is_no_use_is_told_from_one_that_is_away(
    reply: Any, got: str, fix: str, workshop: Path, tmp_path: Path
) -> None:
    with chat_server(lambda content: reply) as (url, _), pytest.raises(DataError) as caught:
        run(workshop, tmp_path / "out", url)
    assert caught.value.got.startswith(got)
    assert fix in caught.value.fix


def test_a_wrong_key_names_the_section(workshop: Path, tmp_path: Path) -> None:
    with chat_server(lambda content: (401, {}, b"")) as (url, _), pytest.raises(ConfigError, match="key") as caught:
        run(workshop, tmp_path / "out", url)
    assert caught.value.where == "reflect.endpoint"
    assert "reflect.model" in caught.value.fix


def test_a_system_message_stays(workshop: Path) -> None:
    from dataclasses import replace

    from finetune.data_selection.reflection.teacher import versions

    row = conversation("Q", "A")
    row = replace(row, messages=(Message("system", "Be brief."), *row.messages))
    found = versions(row, {"versions": {"both": ["Q2", "A2"]}})
    assert found["both"] == (Message("system", "Be brief."), Message("user", "Q2"), Message("assistant", "A2"))


@pytest.mark.real
def test_the_shipped_recipe_passes_a_dry_run(tmp_path: Path) -> None:
    loaded = load_recipe(["reflect/selective"], [f"output_dir={tmp_path / 'out'}"])
    assert reflect(loaded, dry_run=True).status == "planned"
    assert not (tmp_path / "out").exists()
