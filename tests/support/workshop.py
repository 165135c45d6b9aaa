"""A folder to train in: a tiny model, rows, and a recipe for both."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.tiny import save_tiny_model

__all__ = ["write_workshop"]


def write_workshop(folder: Path, rows: Iterable[dict[str, Any]], *sections: str, data: str = "") -> Path:
    """Writes ``model/``, ``rows.jsonl`` and ``recipe.yaml``, and returns the recipe, whose run is ``run/``.

    Args:
        folder: Where to.
        rows: The training rows.
        sections: Lines of the recipe besides the model, the data and the output.
        data: Keys of the data section besides ``train``, as in ``eval: 8``.
    """
    save_tiny_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        f"model: {{name_or_path: {folder / 'model'}, dtype: float32, device: cpu}}",
        f"data: {{train: {folder / 'rows.jsonl'}, {data}}}",
        *sections,
        f"output_dir: {folder / 'run'}",
    ]
    (folder / "recipe.yaml").write_text("\n".join(lines) + "\n")
    return folder / "recipe.yaml"
