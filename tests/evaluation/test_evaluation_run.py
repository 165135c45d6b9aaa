"""Evaluating and talking to a model that lies in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.core.errors import ConfigError, DataError
from finetune.data.records import Message
from finetune.data.render import render_prompt
from finetune.evaluation.chat import ChatSession
from finetune.evaluation.run import evaluate_run, evaluate_tasks
from finetune.models.generate import generate


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any) -> Path:
    tiny_llama.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def rows(tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any) -> Path:
    """Seven questions; the model's own answers are the right ones to three of the four in group ``easy``."""
    prompts = [f"every day at {hour}" for hour in range(7)]
    ids = [render_prompt([Message("user", prompt)], tiny_tokenizer) for prompt in prompts]
    own = generate(tiny_llama, tiny_tokenizer, ids, max_new_tokens=8, batch_size=1)
    lines = []
    for number, (prompt, answer) in enumerate(zip(prompts, own, strict=True)):
        right = answer.strip() if number in (0, 2, 4) else "something else"
        row = {"prompt": prompt, "completion": right, "group": "hard" if number % 2 else "easy"}
        lines.append(json.dumps({**row, "choices": [right, "the quick brown fox"]}))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_exact_match_counts_every_row_once_and_each_group_for_itself(
    tiny_llama: Any, tiny_tokenizer: Any, rows: Path, batch_size: int
) -> None:
    task = {"name": "own", "kind": "exact_match", "data": str(rows), "max_new_tokens": 8}
    (result,) = evaluate_tasks(tiny_llama, tiny_tokenizer, [task], batch_size=batch_size)
    assert (result.task, result.metric, result.n) == ("own", "exact_match", 7)
    assert result.value == pytest.approx(3 / 7)
    assert result.low < 3 / 7 < result.high
    assert result.groups == {"easy": (0.75, 4), "hard": (0.0, 3)}
    assert [prediction.prompt for prediction in result.predictions] == [f"every day at {hour}" for hour in range(7)]
    assert len(result.samples) == 4


def test_evaluate_run_writes_results_beside_earlier_ones(folder: Path, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "scores" / "mine.json"
    evaluate_run(str(folder), [f"exact_match:{rows}"], max_new_tokens=8, output=output)
    found = evaluate_run(str(folder), [f"loss:{rows}", f"choice:{rows}"], output=output)
    assert [result.metric for result in found] == ["loss", "perplexity", "accuracy"]
    assert all(result.n == 7 for result in found)
    stored = json.loads(output.read_text(encoding="utf-8"))["results"]
    assert [result["metric"] for result in stored] == ["exact_match", "loss", "perplexity", "accuracy"]
    predictions = (tmp_path / "scores" / "mine.rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(predictions) == 7


def test_all_wrong_tasks_are_reported_before_the_model_is_loaded(rows: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluate_run("no/such/model", ["crom", f"exact_match:{rows}", "con"])
    assert [problem.what for problem in caught.value.problems] == ["unknown task 'crom'", "unknown task 'con'"]


def test_a_plain_model_without_a_task_is_answered_with_what_to_type(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluate_run(str(folder))
    assert caught.value.fix == f"finetune eval {folder} --task cron"


def test_chat_streams_what_evaluation_generates_and_keeps_the_conversation(
    folder: Path, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    session = ChatSession(str(folder), max_new_tokens=10)
    pieces = list(session.reply("every day at nine"))
    prompt = render_prompt([Message("user", "every day at nine")], tiny_tokenizer)
    (expected,) = generate(tiny_llama, tiny_tokenizer, [prompt], max_new_tokens=10, batch_size=1)
    assert "".join(pieces) == expected
    assert [message.role for message in session.messages] == ["user", "assistant"]
    session.reset()
    assert session.messages == []


def test_whoever_stops_reading_stops_the_answer(folder: Path) -> None:
    session = ChatSession(str(folder), max_new_tokens=200)
    stream = session.reply("every day at nine")
    first = next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert session.messages[-1].content == first.strip()


def test_a_conversation_longer_than_the_context_is_an_error_and_stays_as_it_was(folder: Path) -> None:
    session = ChatSession(str(folder), max_new_tokens=10)
    with pytest.raises(DataError, match="context"):
        list(session.reply("the quick brown fox " * 5_000))
    assert session.messages == []
