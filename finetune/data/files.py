"""Rows of one source: a file of any supported kind, a ``datasets`` folder, or a hub name."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.core.errors import DataError, nearest
from finetune.core.shipped import resolve_data_path
from finetune.data.jsonlines import BadRowError, decode_text, parse_lines, parse_object
from finetune.data.records import DataSource

__all__ = ["Row", "read_rows"]

Row = tuple[int | None, dict[str, Any] | BadRowError]
"""Line in the file, counted from 1, or None; and the row, or what is wrong with it."""

_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def read_rows(source: DataSource) -> Iterator[Row]:
    """Yields the rows of ``source`` in order.

    Raises:
        DataError: The source does not exist, is empty, or cannot be read as a whole.
    """
    path = Path(resolve_data_path(source.path)).expanduser()
    if path.is_dir():
        return _read_folder(path, source.split)
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix not in _SUFFIXES:
        if path.is_file():
            raise DataError("the file has an unknown suffix", where=str(path), want=", ".join((*_SUFFIXES, "… .gz")))
        return _read_hub(source)
    if not path.is_file():
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError("the data file does not exist", where=str(path), near=nearest(path.name, siblings))
    return _read_file(path, plain.suffix)


def _read_file(path: Path, suffix: str) -> Iterator[Row]:
    if suffix == ".parquet":
        return _read_parquet(path)
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = decode_text(content)
    except BadRowError as bad:
        raise DataError(bad.reason, where=str(path), got=bad.detail) from bad
    except (gzip.BadGzipFile, EOFError) as error:
        raise DataError("the file is not a whole gzip file", where=str(path), got=str(error)) from error
    if not text.strip():
        raise DataError("the data file is empty", where=str(path))
    if suffix == ".csv":
        return _read_csv(path, text)
    return _read_json(path, text) if suffix == ".json" else parse_lines(text)


def _read_json(path: Path, text: str) -> Iterator[Row]:
    if not text.lstrip().startswith("["):
        # Many files called .json hold one object a line.
        yield from parse_lines(text)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            "the file is not valid JSON", where=f"{path}:{error.lineno}:{error.colno}", got=error.msg
        ) from error
    for row in rows:
        try:
            yield None, parse_object(json.dumps(row))
        except BadRowError as bad:
            yield None, bad


def _read_csv(path: Path, text: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader)
        twice = next((name for name in header if header.count(name) > 1), None)
        if twice is not None:
            raise DataError("the file has a column twice", where=f"{path}:1", got=twice)
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                detail = f"{len(cells)} cells, {len(header)} columns"
                yield reader.line_num, BadRowError("the row has another number of cells than the header", detail)
            else:
                yield reader.line_num, {name: cell for name, cell in zip(header, cells, strict=True) if cell}
    except csv.Error as error:
        raise DataError("the file is not valid CSV", where=f"{path}:{reader.line_num}", got=str(error)) from error


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError("the file is not a Parquet file", where=str(path), got=str(error).splitlines()[0]) from error
    for batch in table.to_batches():
        for row in batch.to_pylist():
            yield None, row


def _read_folder(path: Path, split: str | None) -> Iterator[Row]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (FileNotFoundError, OSError, ValueError) as error:
        raise DataError(
            "the folder is not one that datasets saved", where=str(path), want="what Dataset.save_to_disk writes"
        ) from error
    yield from _rows_of(loaded, split, str(path))


def _read_hub(source: DataSource) -> Iterator[Row]:
    import datasets

    try:
        loaded = datasets.load_dataset(source.path, source.subset)
    except Exception as error:
        raise DataError(
            "the data set is neither a file nor reachable on the hub",
            where=f"data: {source.path}",
            got=str(error).strip().splitlines()[0],
            want=f"a file ({', '.join(_SUFFIXES)}, .gz), a folder of datasets, or a hub name",
        ) from error
    yield from _rows_of(loaded, source.split, source.path)


def _rows_of(loaded: Any, split: str | None, where: str) -> Iterator[Row]:
    if isinstance(loaded, dict):
        name = split or "train"
        if name not in loaded:
            raise DataError(
                f"there is no split {name!r}", where=where, want=", ".join(loaded), near=nearest(name, loaded)
            )
        loaded = loaded[name]
    for row in loaded:
        yield None, {key: value for key, value in row.items() if value is not None}
