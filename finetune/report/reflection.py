"""The page that a reflection leaves: one file, no script, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.core.files import write_text
from finetune.report.figures import count_in_words, seconds_in_words, share_in_words
from finetune.report.panels import counted_reasons, created_in_words, fact_groups
from finetune.report.record import command_of
from finetune.report.rendering import embedded_picture, render_page

__all__ = ["Rewrite", "ShownVersion", "write_reflection_page"]


@dataclass(frozen=True)
class ShownVersion:
    """One version of a row.

    Attributes:
        instruction: What is said before the answer.
        answer: The answer.
        ifd: Its instruction-following difficulty.
        r_ifd: Its reversed IFD.
    """

    instruction: str
    answer: str
    ifd: str
    r_ifd: str


@dataclass(frozen=True)
class Rewrite:
    """A row and what is kept in its place.

    Attributes:
        where: File and line.
        origin: What of the kept version the teacher wrote.
        before: The row.
        after: What is kept.
    """

    where: str
    origin: str
    before: ShownVersion
    after: ShownVersion


def write_reflection_page(
    path: Path,
    manifest: Mapping[str, Any],
    *,
    rewrites: Sequence[Rewrite],
    pictures: Sequence[Path],
    config: str,
    commands: Sequence[tuple[str, str]],
) -> None:
    """Writes ``report.html`` of a reflection.

    Args:
        path: Where to.
        manifest: The content of the reflection's ``manifest.json``.
        rewrites: Rows that were rewritten, to be shown beside what is kept.
        pictures: PNG files.
        config: The recipe.
        commands: What a user may type next, and what for.
    """
    counts = manifest["counts"]
    page = render_page(
        "reflection.html.jinja",
        name=path.parent.absolute().name,
        command=command_of(manifest),
        created=created_in_words(manifest),
        tiles=_tiles(manifest),
        warnings=[],
        origins=_origins(counts),
        rewrites=rewrites,
        pictures=[embedded_picture(file) for file in pictures],
        left_out=counted_reasons(counts["dropped"], counts["left_out"]),
        facts=fact_groups(_facts(manifest)),
        config=config,
        commands=commands,
    )
    write_text(path, page)


def _tiles(manifest: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the figures at the top of the page: label, value, remark."""
    counts, spent = manifest["counts"], manifest["spent"]
    kept = sum(counts["kept"].values())
    rewritten = kept - counts["kept"].get("original", 0)
    cost = "no price is given" if spent["cost"] is None else f"cost {spent['cost']:.4g}"
    return [
        ("Kept", f"{kept:,} rows", f"{share_in_words(kept / counts['read'])} of {counts['read']:,}"),
        ("Rewritten", f"{rewritten:,} rows", f"{share_in_words(rewritten / kept)} of those"),
        ("The teacher wrote", f"{count_in_words(spent['new_tokens'])} tokens", cost),
        ("Time", seconds_in_words(manifest["seconds"]), f"{manifest['measured_now']:,} measurements"),
    ]


def _origins(counts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns for each origin how many rows have it, and what became of the reflections that were to give it."""
    return [
        (
            origin,
            f"{counts['kept'].get(origin, 0):,}",
            ", ".join(f"{count:,} {status}" for status, count in counts["reflections"].get(origin, {}).items()),
        )
        for origin in ("original", *counts["reflections"])
    ]


def _facts(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {
        "Teacher": manifest["teacher"],
        "Student": {name: f"fingerprint {fingerprint}" for name, fingerprint in manifest["models"].items()},
        "Kept": manifest["reflect"],
        "Bill": manifest["spent"],
        "Data": manifest["data"],
    }
