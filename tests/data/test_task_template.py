"""Labelled rows put into words, and questions with all their answers in a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.config.schema import Source
from finetune.core.errors import DataError
from finetune.data.collate import PaddingCollator
from finetune.data.jsonlines import BadRowError
from finetune.data.prepare import prepare_dataset
from finetune.data.records import DataSource
from finetune.data.task_template import TASK_TEMPLATES, TaskTemplate
from finetune.data.templates import resolve_template
from support.tiny import tiny_tokenizer

ROWS = [{"sentence": "all  good {here} ", "label": 1}, {"sentence": "bad", "label": 0}]
SST2 = TASK_TEMPLATES["sst2"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def plain_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = resolve_template("plain", tokenizer)
    return tokenizer


def source(folder: Path, rows: list[dict[str, Any]]) -> DataSource:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(path=str(path))


def test_a_row_becomes_a_question_with_its_answers() -> None:
    words = {"completion": " great", "choices": [" terrible", " great"]}
    # What stands in a row is text, whatever it looks like.
    assert SST2.words({**ROWS[0], "id": 7}) == {"id": 7, "prompt": "all  good {here} It was", **words}
    named = TaskTemplate(prompt="{text}:", label="kind", answers={"ham": " no", "spam": " yes"})
    assert named.words({"text": "buy", "kind": "spam"})["completion"] == " yes"
    assert TASK_TEMPLATES["boolq"].words({"passage": "P", "question": "q", "answer": True})["completion"] == " Yes"
    assert SST2.words({"sentence": "s", "label": "1"})["completion"] == " great"


@pytest.mark.parametrize(("label", "said"), [(2, "2; data.template has 0, 1"), ("pos", "'pos'; "), (-1, "-1; ")])
def test_a_label_without_an_answer(label: Any, said: str) -> None:
    with pytest.raises(BadRowError, match="the label has no answer") as caught:
        SST2.words({"sentence": "s", "label": label})
    assert said in caught.value.detail


def test_a_missing_column_is_named() -> None:
    with pytest.raises(BadRowError, match="column is missing") as caught:
        SST2.words({"text": "s", "label": 1})
    assert "'sentence' of data.template; the row has text, label" in caught.value.detail


def test_other_answers_follow_the_right_one_in_a_batch(tmp_path: Path) -> None:
    tokenizer = plain_tokenizer()
    prepared = prepare_dataset([source(tmp_path, ROWS)], tokenizer, template=SST2, choices=True)
    batch = PaddingCollator(pad_token_id=0)([prepared.dataset[0], prepared.dataset[1]])
    assert batch["options"] == [2, 2]
    said = [
        (tokenizer.decode(ids[labels == -100][mask[labels == -100] > 0]), tokenizer.decode(labels[labels != -100]))
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
    ]
    first, second = "all  good {here} It was", "bad It was"
    assert said == [(first, " great"), (first, " terrible"), (second, " terrible"), (second, " great")]
    plain = prepare_dataset([source(tmp_path, ROWS)], tokenizer, template=SST2)
    assert "options" not in PaddingCollator(pad_token_id=0)([plain.dataset[0]])
    assert plain.fingerprint != prepared.fingerprint


def test_rows_without_choices_are_refused_where_options_are_compared(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "a"}, {"prompt": "p", "completion": "a", "choices": ["b", "c"]}]
    with pytest.raises(DataError, match="the row has no choices") as caught:
        prepare_dataset([source(tmp_path, rows)], plain_tokenizer(), choices=True)
    assert [problem.where.rpartition(":")[2] for problem in caught.value.problems] == ["1", "2"]
    assert "none of the choices" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"prompt": "It was", "answers": ["a", "b"]}, "a prompt that names a column"),
        ({"prompt": "{text}:", "answers": ["a"]}, "two or more answers"),
        ({"prompt": "{text}:", "answers": {"x": "a", "y": "a"}}, "each another text"),
    ],
)
def test_templates_that_ask_nothing(fields: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        TaskTemplate.model_validate(fields)
