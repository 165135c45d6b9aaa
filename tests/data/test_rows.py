"""Reading rows: every file kind, every format, every way in which a row can be unusable."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finetune.core.errors import DataError
from finetune.data.load import load_conversations
from finetune.data.records import Message

ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}


@dataclass(frozen=True)
class Source:
    path: str
    split: str | None = None
    weight: float = 1.0
    format: str | None = None
    subset: str | None = None
    columns: dict[str, str] | None = None
    task: str | None = None


def load(path: Path, **options: Any):
    return load_conversations([Source(str(path))], **options)


def write(folder: Path, text: str, name: str = "rows.jsonl", encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ALPACA, ["user: Add.\n1 2", "assistant: 3"]),
        ({**ALPACA, "input": "<noinput>"}, ["user: Add.", "assistant: 3"]),
        (
            {**ALPACA, "system": "Be brief.", "history": [["a", "b"]]},
            ["system: Be brief.", "user: a", "assistant: b", "user: Add.\n1 2", "assistant: 3"],
        ),
        ({"prompt": "p", "completion": "c"}, ["user: p", "assistant: c"]),
        (
            {"prompt": [{"role": "user", "content": "p"}], "completion": [{"role": "assistant", "content": "c"}]},
            ["user: p", "assistant: c"],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}]},
                    {"role": "assistant", "content": "b"},
                ]
            },
            ["user: a", "assistant: b"],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "weather?"},
                    {"from": "function_call", "value": "{}"},
                    {"from": "observation", "value": "sun"},
                    {"from": "gpt", "value": "It is sunny."},
                ]
            },
            ["user: weather?", "assistant: {}", "tool: sun", "assistant: It is sunny."],
        ),
    ],
)
def test_each_format_becomes_messages(tmp_path: Path, row: dict[str, Any], expected: list[str]) -> None:
    (conversation,), dropped = load(write(tmp_path, lines(row)))
    assert [f"{message.role}: {message.content}" for message in conversation.messages] == expected
    assert not dropped
    assert conversation.line == 1


def test_plain_text_and_extra_columns_are_kept(tmp_path: Path) -> None:
    (text,), _ = load(write(tmp_path, lines({"text": "Once upon", "id": "x7", "group": "g"})))
    assert (text.text, text.messages, text.id, text.extra["group"]) == ("Once upon", (), "x7", "g")


def test_every_file_kind_gives_the_same_rows(tmp_path: Path) -> None:
    import datasets

    rows = [ALPACA, {**ALPACA, "output": "4"}]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "folder"))
    write(tmp_path, json.dumps(rows), "rows.json")
    write(tmp_path, "instruction,input,output\nAdd.,1 2,3\nAdd.,1 2,4\n", "rows.csv")
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines(*rows).encode()))
    names = ["rows.parquet", "folder", "rows.json", "rows.csv", "packed.jsonl.gz"]
    found = [[row.messages for row in load(tmp_path / name)[0]] for name in names]
    expected = [(Message("user", "Add.\n1 2"), Message("assistant", answer)) for answer in "34"]
    assert found == [expected] * len(names)


@pytest.mark.parametrize(
    "text", ["\ufeff" + lines(ALPACA), lines(ALPACA).replace("\n", "\r\n"), "\n\n" + lines(ALPACA)]
)
def test_harmless_oddities_are_read(tmp_path: Path, text: str) -> None:
    assert len(load(write(tmp_path, text))[0]) == 1


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"instruction": "a", "output": ', "not valid JSON"),
        ('{"output": "a", "output": "b", "instruction": "c"}', "a key twice"),
        ('{"instruction": "a", "output": NaN}', "JSON does not have"),
        ('{"instruction": "a", "output": "\\ud800"}', "surrogate"),
        ("5", "not a JSON object"),
        ('[{"instruction": "a"}]', "not a JSON object"),
        ('{"instruction": "a", "output": 5}', "holds no text"),
        ('{"instruction": "a", "output": ["b"]}', "holds no text"),
        ('{"instruction": "a", "output": "  "}', "answer is empty"),
        ('{"question": "a", "answer": "b"}', "fit no format"),
        ('{"messages": [{"role": "wizard", "content": "a"}]}', "unknown role"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no answer"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "something else than text"),
    ],
)
def test_an_unusable_row_is_named_by_line_or_skipped_and_counted(tmp_path: Path, bad: str, reason: str) -> None:
    path = write(tmp_path, lines(ALPACA) + bad + "\n" + lines(ALPACA))
    with pytest.raises(DataError) as caught:
        load(path)
    assert reason in caught.value.what
    assert caught.value.where.endswith("rows.jsonl:2")
    assert "on_error: skip" in caught.value.fix
    kept, dropped = load(path, on_error="skip")
    assert len(kept) == 2
    assert [(row.line, reason in row.reason) for row in dropped] == [(2, True)]


def test_all_unusable_rows_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(write(tmp_path, "{\n" + lines(ALPACA) + "7\n"))
    assert [problem.where.rpartition(":")[2] for problem in caught.value.problems] == ["1", "3"]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("rows.jsonl", b"", "empty"),
        ("rows.jsonl", "{}".encode("utf-16"), "UTF-16"),
        ("rows.jsonl", b'{"text": "\xff\xfe"}', "not UTF-8"),
        ("rows.csv", b"instruction,output,output\na,b,c\n", "a column twice"),
        ("rows.parquet", b"no parquet", "not a Parquet file"),
        ("rows.jsonl.gz", b"no gzip", "gzip"),
        ("rows.docx", b"x", "unknown suffix"),
    ],
)
def test_an_unreadable_file_is_one_error(tmp_path: Path, name: str, content: bytes, part: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(tmp_path / name)
    assert part in caught.value.what
    assert name in caught.value.where


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, lines(ALPACA), "train.jsonl")
    with pytest.raises(DataError) as caught:
        load(tmp_path / "trian.jsonl")
    assert caught.value.near == "train.jsonl"


def test_a_wrong_split_lists_the_splits(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list([ALPACA])}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(DataError) as caught:
        load_conversations([Source(str(tmp_path / "d"), split="trian")])
    assert (caught.value.want, caught.value.near) == ("train", "train")


def test_columns_rename_and_system_is_added_where_there_is_none(tmp_path: Path) -> None:
    path = write(tmp_path, lines({"question": "q", "answer": "a"}))
    (row,), _ = load(path, columns={"prompt": "question", "completion": "answer"}, system="S")
    assert row.messages == (Message("system", "S"), Message("user", "q"), Message("assistant", "a"))


def test_a_source_may_have_columns_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, lines({"question": "q", "answer": "a"}))
    source = Source(str(path), columns={"prompt": "question", "completion": "answer"})
    (row,), _ = load_conversations([source], columns={"prompt": "text"})
    assert row.messages == (Message("user", "q"), Message("assistant", "a"))


def test_weights_take_exact_shares_the_same_for_the_same_seed(tmp_path: Path) -> None:
    path = str(write(tmp_path, lines(*({**ALPACA, "output": str(i)} for i in range(10)))))

    def answers(weight: float, seed: int) -> list[str]:
        rows, _ = load_conversations([Source(path, weight=weight)], seed=seed)
        return [row.messages[-1].content for row in rows]

    assert len(answers(0.5, 1)) == 5
    assert answers(0.5, 1) == answers(0.5, 1) != answers(0.5, 2)
    assert sorted(answers(2.0, 1)) == sorted([str(i) for i in range(10)] * 2)
