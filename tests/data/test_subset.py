"""A subset is a filter on the user's file: the same form, the same columns, the same bytes where there are lines."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from finetune.data.files import read_rows
from finetune.data.subset import subset_name, write_subset


@dataclass(frozen=True)
class Source:
    path: str
    split: str | None = None
    weight: float = 1.0
    format: str | None = None
    subset: str | None = None
    columns: dict[str, str] | None = None
    task: str | None = None


LINES = [
    '{"instruction":"Übersetze",  "input":"<noinput>", "output": "d\\u00e9j\\u00e0 vu", "meta": {"n": 1.0}}',
    '{"prompt": "b", "completion": "c", "mine": [1, null]}',
    '{"text": "plain\\n\\ntext"}',
    '{"messages": [{"role": "user", "content": "日本"}, {"role": "assistant", "content": "Tokyo"}]}',
]


def test_lines_are_copied_byte_for_byte(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(("\ufeff" + LINES[0] + "\r\n\n" + "\n".join(LINES[1:])).encode())
    write_subset(Source(str(file)), [0, 3], tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == f"{LINES[0]}\r\n{LINES[3]}\n".encode()


def test_a_compressed_file_stays_compressed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(LINES).encode()))
    write_subset(Source(str(file)), [2, 1], tmp_path / "out.jsonl.gz")
    assert gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()).decode().splitlines() == [LINES[2], LINES[1]]


@pytest.mark.parametrize("suffix", ["json", "parquet", "csv", "folder"])
def test_every_other_form_keeps_its_columns_and_types(suffix: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": f'say "{number}", é', "completion": f"a,\nb{number}", "weight": number / 2} for number in range(5)
    ]
    file = tmp_path / ("rows" if suffix == "folder" else f"rows.{suffix}")
    if suffix == "json":
        file.write_text(json.dumps(rows))
    elif suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif suffix == "csv":
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(file))
    target = tmp_path / "out" / file.name
    write_subset(Source(str(file)), [1, 4], target)
    whole, kept = ([row for _, row in read_rows(Source(str(path)))] for path in (file, target))
    assert kept == [whole[1], whole[4]]
    if suffix == "parquet":
        assert pyarrow.parquet.read_schema(target).equals(pyarrow.parquet.read_schema(file))


def test_the_subset_is_called_like_the_file() -> None:
    assert subset_name(Source("data/train.jsonl.gz")) == "train.jsonl.gz"
    assert subset_name(Source("tatsu-lab/alpaca")) == "alpaca"
    assert subset_name(Source("shipped:quickstart/train.jsonl")) == "train.jsonl"
