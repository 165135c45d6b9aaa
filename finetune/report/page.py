"""The page that a run leaves: one file, no script, nothing loaded from anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.core.files import write_text
from finetune.report.figures import bytes_in_words, count_in_words, seconds_in_words, share_in_words
from finetune.report.metrics import CURVES, read_events, read_series
from finetune.report.plots import draw_svg
from finetune.report.record import command_of, lookup, method_settings, next_commands, read_record
from finetune.report.rendering import embedded_picture, render_page
from finetune.report.results import ResultRow, compare_results, compare_samples

__all__ = ["write_report"]

_PARTS = {
    "process": "interpreter and libraries",
    "weights": "frozen weights",
    "trained": "trained weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits",
}


def write_report(run: Path) -> Path:
    """Writes ``report.html`` of a run, also of one that was interrupted, failed, or never evaluated.

    Args:
        run: The run directory.

    Returns:
        The page's path.

    Raises:
        CheckpointError: ``run`` is no run directory.
    """
    from markupsafe import Markup

    record = read_record(run)
    rows = compare_results(record.get("evaluation") or {})
    events = read_events(run)
    drawn = [(curve, read_series(events, curve)) for curve in CURVES]
    page = render_page(
        "report.html.jinja",
        name=run.absolute().name,
        status=str(record.get("status") or "unknown"),
        started=_moment(record.get("started")),
        error=record.get("error"),
        warnings=[str(text) for text in record.get("warnings") or ()],
        command=command_of(record),
        headline=_headline(rows),
        tiles=_tiles(record),
        rows=rows,
        samples=compare_samples(record),
        # Drawn by us from numbers; every other text on the page is escaped.
        curves=[(curve.title, Markup(draw_svg(series))) for curve, series in drawn if series],
        pictures=_pictures(run),
        memory=_memory(record),
        facts=_facts(record),
        chosen=[str(line) for line in lookup(record, "method.chosen", [])],
        example=lookup(record, "data.example", ""),
        config=_config(run, record),
        record=_environment(record),
        commands=next_commands(run, record),
    )
    path = run / "report.html"
    write_text(path, page)
    return path


def _pictures(run: Path) -> list[tuple[str, str]]:
    """Returns title and base64 content of the pictures that the method has drawn: those that are no curves."""
    curves = {curve.name for curve in CURVES}
    files = sorted(file for file in (run / "plots").glob("*.png") if file.stem not in curves)
    return [embedded_picture(file) for file in files]


def _headline(rows: list[ResultRow]) -> ResultRow | None:
    """Returns the first result that has a scale from 0 to 1, else the first; None without an evaluation."""
    whole = [row for row in rows if not row.group and row.after is not None]
    return next((row for row in whole if row.share), whole[0] if whole else None)


def _tiles(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the figures at the top of the page: label, value, remark. What was not measured is left out."""
    saved, base = lookup(record, "memory.saved_bytes"), lookup(record, "memory.base_bytes")
    loss, eval_loss = lookup(record, "final.loss"), lookup(record, "final.eval_loss")
    trained, steps = lookup(record, "method.trained"), lookup(record, "final.steps", lookup(record, "plan.steps"))
    tiles = [
        ("Trained", count_in_words(trained), f"{share_in_words(lookup(record, 'method.share'))} of the parameters"),
        ("Training time", seconds_in_words(record.get("seconds")), "" if steps is None else f"{steps:,} steps"),
        (
            "Peak memory",
            bytes_in_words(lookup(record, "memory.measured_peak_bytes")),
            f"estimated {bytes_in_words(lookup(record, 'memory.estimate_bytes.peak'))}",
        ),
        (
            "Saved",
            bytes_in_words(saved),
            f"{share_in_words(saved / base)} of the model in 16 bits" if saved is not None and base else "",
        ),
        (
            "Final loss",
            "–" if loss is None else f"{loss:.3f}",
            "" if eval_loss is None else f"{eval_loss:.3f} on held-out data",
        ),
    ]
    return [tile for tile in tiles if tile[1] != "–"]


def _memory(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the bars of estimate and measurement on one scale, in percent of the larger; None without an estimate."""
    estimate = dict(lookup(record, "memory.estimate_bytes", {}))
    peak = estimate.pop("peak", None)
    measured = lookup(record, "memory.measured_peak_bytes")
    if not peak:
        return None
    scale = max(peak, measured or 0)
    parts = [
        {
            "name": name,
            "label": _PARTS.get(name, name),
            "size": bytes_in_words(size),
            "width": round(100 * size / scale, 3),
        }
        for name, size in estimate.items()
        if size > 0
    ]
    return {
        "parts": parts,
        "estimate": bytes_in_words(peak),
        "measured": None if measured is None else bytes_in_words(measured),
        "measured_width": None if measured is None else round(100 * measured / scale, 3),
        "ratio": None if measured is None else f"{measured / peak:.2f}",
    }


def _facts(record: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns what was run, in groups of label and value; what is not known is left out."""
    dropped = lookup(record, "data.dropped", {})
    tokens, labelled = lookup(record, "data.tokens"), lookup(record, "data.label_tokens")
    geometry = [lookup(record, f"plan.{key}") for key in ("per_device_batch", "accumulation", "world_size")]
    groups: dict[str, dict[str, Any]] = {
        "Model": {
            "name": lookup(record, "model.name_or_path"),
            "parameters": _count(lookup(record, "model.parameters")),
            "dtype": lookup(record, "model.dtype"),
            "attention": lookup(record, "model.attn_implementation"),
            "embeddings": {True: "tied", False: "not tied"}.get(lookup(record, "model.tied")),
        },
        "Method": {
            "name": lookup(record, "method.name"),
            "paper": lookup(record, "method.paper"),
            "trained": _count(lookup(record, "method.trained")),
            **{key: _value(value) for key, value in method_settings(record).items()},
        },
        "Data": {
            "examples": _count(lookup(record, "data.examples")),
            "held out": _count(lookup(record, "data.eval_examples")),
            "tokens": _count(tokens),
            "carry loss": share_in_words(labelled / tokens) if tokens and labelled is not None else None,
            "dropped": ", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or None,
        },
        "Run": {
            "steps": _count(lookup(record, "plan.steps")),
            "epochs": _value(lookup(record, "plan.epochs")),
            "batch": None if None in geometry else f"{geometry[0]} rows x {geometry[1]} x {geometry[2]} processes",
            "seed": _value(record.get("seed")),
            "device": lookup(record, "device.name", lookup(record, "device.type")),
        },
    }
    found = {title: [(key, str(value)) for key, value in facts.items() if value] for title, facts in groups.items()}
    return [(title, facts) for title, facts in found.items() if facts]


def _count(count: int | None) -> str | None:
    return None if count is None else count_in_words(count)


def _value(value: Any) -> str | None:
    if value is None:
        return None
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _moment(text: Any) -> str:
    return str(text).replace("T", " ").replace("+00:00", " UTC") if text else ""


def _config(run: Path, record: Mapping[str, Any]) -> str:
    file = run / "config.resolved.yaml"
    return file.read_text(encoding="utf-8") if file.is_file() else str(record.get("config_resolved") or "")


def _environment(record: Mapping[str, Any]) -> str:
    keys = ("finetune", "versions", "python", "device", "world_size")
    return json.dumps({key: record[key] for key in keys if key in record}, indent=2, ensure_ascii=False)
