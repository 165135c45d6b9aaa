"""Some rows of a source, written in the source's own form: a filter on the user's file, not a conversion of it."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from finetune.core.files import replaced_file, replaced_folder
from finetune.core.shipped import resolve_data_path
from finetune.data.jsonlines import decode_text
from finetune.data.records import DataSource

__all__ = ["subset_name", "write_subset"]


def subset_name(source: DataSource) -> str:
    """Returns what the subset of a source is called: the name of its file or folder, the last part of a hub name."""
    return Path(resolve_data_path(source.path)).name


def write_subset(source: DataSource, numbers: Sequence[int], target: Path) -> None:
    """Writes rows of ``source`` to ``target`` in the given order; the file or folder appears whole or not at all.

    Lines of JSON are copied byte for byte, other forms keep every column and its type. A hub data set becomes a folder
    that ``datasets`` saved.

    Args:
        source: A source that :func:`finetune.data.files.read_rows` reads.
        numbers: Positions of the rows in it, counted from 0.
        target: Where to, with the same suffix.
    """
    path = Path(resolve_data_path(source.path)).expanduser()
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix not in (".jsonl", ".json", ".csv", ".parquet"):
        _write_dataset(source, path, numbers, target)
    elif plain.suffix == ".parquet":
        _write_parquet(path, numbers, target)
    else:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        written = _filtered(content, plain.suffix, numbers)
        # Without the time of writing, the same rows are the same bytes.
        written = gzip.compress(written, mtime=0) if path.suffix == ".gz" else written
        with replaced_file(target) as beside:
            beside.write_bytes(written)


def _filtered(content: bytes, suffix: str, numbers: Sequence[int]) -> bytes:
    text = decode_text(content)
    if suffix == ".csv":
        return _csv_rows(text, numbers).encode()
    if suffix == ".json" and text.lstrip().startswith("["):
        rows = json.loads(text)
        kept = [rows[number] for number in numbers]
        return (json.dumps(kept, ensure_ascii=False, indent=2) + "\n").encode()
    lines = [line for line in text.split("\n") if line.strip()]
    return "".join(f"{lines[number]}\n" for number in numbers).encode()


def _csv_rows(text: str, numbers: Sequence[int]) -> str:
    header, *rows = [cells for cells in csv.reader(io.StringIO(text, newline=""), strict=True) if cells]
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\r\n" if "\r\n" in text else "\n")
    writer.writerow(header)
    writer.writerows(rows[number] for number in numbers)
    return buffer.getvalue()


def _write_parquet(path: Path, numbers: Collection[int], target: Path) -> None:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path).take(list(numbers))
    with replaced_file(target) as beside:
        pyarrow.parquet.write_table(table, beside)


def _write_dataset(source: DataSource, path: Path, numbers: Collection[int], target: Path) -> None:
    import datasets

    loaded: Any = (
        datasets.load_from_disk(str(path)) if path.is_dir() else datasets.load_dataset(source.path, source.subset)
    )
    if isinstance(loaded, dict):
        loaded = loaded[source.split or "train"]
    with replaced_folder(target) as beside:
        loaded.select(list(numbers)).save_to_disk(str(beside))
