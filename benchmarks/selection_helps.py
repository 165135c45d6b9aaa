"""Does a selection help? ``finetune select --compare`` on real data: a quarter of a pool, chosen in several ways.

The pool is a uniform draw from Alpaca. LoRA (r = 8, all linear layers) trains the bundled model for one pass over what
each scorer keeps, and over all rows; every model, the untouched one too, is measured by its perplexity on the answers
of two sets that nobody selected from: Alpaca rows that a judge rated 4.5 or more and that are not in the pool, and rows
of Dolly, which people wrote. ``random`` with three seeds shows what chance does: a scorer helps where it is below the
lowest of those. Subsets have the same number of rows, so those with longer answers have more tokens to learn from.

Needs ``../shared/data``. Run: python benchmarks/selection_helps.py [--quick] [--json PATH]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims import Claim, argument_parser, report

MODEL = "bundled:smollm2-135m-instruct"
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
POOL = DATA / "alpaca_random" / "train.jsonl"
JUDGED = DATA / "alpaca_judged_good" / "claude_t45.jsonl"
DOLLY = DATA / "dolly_filtered" / "train.jsonl"
LONGEST = 192
"""Tokens of the longest rows that are taken, in the pool and where models are measured."""
OTHERS = ["length", "r_ifd", "loss", *({"name": "random", "seed": seed} for seed in (1, 2, 3))]


def short_rows(file: Path, count: int, tokenizer: Any, *, without: Sequence[Mapping[str, Any]] = ()) -> list[Any]:
    """Returns the first ``count`` rows of a file that are short enough and ask nothing that ``without`` asks."""
    from finetune.config.schema import Source
    from finetune.data_selection.pool import load_pool

    asked = {row["instruction"] for row in without}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    pool = load_pool([Source(path=str(file))], tokenizer, max_length=LONGEST, on_error="skip", max_dropped=1.0)
    short = [rows[example.conversation.number] for example in pool.examples]
    return [row for row in short if row["instruction"] not in asked][:count]


def write_data(folder: Path, *, pool: int, measured: int) -> None:
    """Writes ``pool.jsonl`` and the two sets that models are measured on."""
    from finetune.models import load_tokenizer

    tokenizer = load_tokenizer(MODEL)
    trained = short_rows(POOL, pool, tokenizer)
    judged = short_rows(JUDGED, measured, tokenizer, without=trained)
    dolly = short_rows(DOLLY, measured, tokenizer)
    for name, rows in (("pool", trained), ("judged_good", judged), ("dolly", dolly)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def recipe(folder: Path) -> dict[str, Any]:
    """Returns the recipe of the comparison, as ``finetune select --compare`` reads it."""
    return {
        "model": {"name_or_path": MODEL, "dtype": "bfloat16", "device": "cpu"},
        "method": {"name": "lora", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        "data": {"train": str(folder / "pool.jsonl"), "max_length": LONGEST},
        "train": {
            "per_device_train_batch_size": 4,
            "num_train_epochs": 1,
            "learning_rate": 5e-4,
            "lr_scheduler_type": "cosine",
            "save_strategy": "no",
        },
        "eval": {"tasks": [f"loss:{folder / name}.jsonl" for name in ("judged_good", "dolly")], "batch_size": 8},
        "select": {"scorer": "ifd", "compare": OTHERS, "fraction": 0.25},
        "output_dir": str(folder / "comparison"),
    }


def claims_of(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Returns the perplexities of every entry; the baseline is the lowest of the random ones."""
    found = {
        (row["name"], one["task"]): one["value"]
        for row in rows
        for one in row["results"]
        if one["metric"] == "perplexity"
    }
    claims = []
    for (name, task), perplexity in found.items():
        chance = [value for (other, where), value in found.items() if where == task and other.startswith("random")]
        claims.append(Claim(f"{name}/perplexity_{task}".replace(" ", "_"), perplexity, "", "", min(chance)))
    return claims


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares and reports."""
    from rich.console import Console

    from finetune.config.load import load_recipe
    from finetune.selection.compare import compare

    given = argument_parser(__doc__ or "").parse_args(arguments)
    if not POOL.is_file():
        sys.exit(f"error: there is no {POOL}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_data(folder, pool=8 if given.quick else 320, measured=2 if given.quick else 100)
        sections = [f"{name}={json.dumps(section)}" for name, section in recipe(folder).items()]
        found = compare(load_recipe([], sections), console=Console(stderr=True))
    sizes = ", ".join(f"{row['name']} {row['tokens']:,}" for row in found.rows if row["tokens"])
    report(f"LoRA on a quarter of {POOL.parent.name}, tokens: {sizes}", claims_of(found.rows), given.json)


if __name__ == "__main__":
    main()
