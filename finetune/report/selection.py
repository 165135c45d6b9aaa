"""The page that a selection leaves: one file, no script, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.core.files import write_text
from finetune.report.figures import count_in_words, seconds_in_words, share_in_words
from finetune.report.panels import counted_reasons, created_in_words, fact_groups
from finetune.report.record import command_of, lookup
from finetune.report.rendering import embedded_picture, render_page

__all__ = ["ShownRow", "write_selection_page"]


@dataclass(frozen=True)
class ShownRow:
    """A row that the page shows.

    Attributes:
        score: What it scores.
        where: File and line.
        prompt: What is said before the last answer.
        answer: The last answer, or the text of a row without one.
        kept: Whether it is kept.
        reason: Why it is not.
    """

    score: str
    where: str
    prompt: str
    answer: str
    kept: bool
    reason: str


def write_selection_page(
    path: Path,
    manifest: Mapping[str, Any],
    *,
    highest: Sequence[ShownRow],
    lowest: Sequence[ShownRow],
    pictures: Sequence[Path],
    config: str,
    commands: Sequence[tuple[str, str]],
) -> None:
    """Writes ``report.html`` of a selection.

    Args:
        path: Where to.
        manifest: The content of the selection's ``manifest.json``.
        highest: The rows of highest score, the highest first.
        lowest: The rows of lowest score, the lowest first.
        pictures: PNG files.
        config: The recipe.
        commands: What a user may type next, and what for.
    """
    page = render_page(
        "selection.html.jinja",
        name=path.parent.absolute().name,
        command=command_of(manifest),
        created=created_in_words(manifest),
        tiles=_tiles(manifest),
        warnings=manifest["warnings"],
        tables=[("Highest scores", highest), ("Lowest scores", lowest)],
        pictures=[embedded_picture(file) for file in pictures],
        left_out=counted_reasons(*(manifest["counts"][part] for part in ("dropped", "unscored", "left_out"))),
        facts=fact_groups(_facts(manifest)),
        config=config,
        commands=commands,
    )
    write_text(path, page)


def _tiles(manifest: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the figures at the top of the page: label, value, remark."""
    counts, tokens, spread = manifest["counts"], manifest["tokens"], manifest["score"]["kept"]
    rate = manifest["rows_per_second"]
    return [
        (
            "Kept",
            f"{counts['kept']:,} rows",
            f"{share_in_words(counts['kept'] / counts['read'])} of {counts['read']:,}",
        ),
        ("Tokens kept", count_in_words(tokens["kept"]), f"{share_in_words(tokens['kept'] / tokens['pool'])} of all"),
        ("Scores kept", f"{spread['lowest']:.4g} to {spread['highest']:.4g}", f"median {spread['median']:.4g}"),
        ("Time", seconds_in_words(manifest["seconds"]), f"{rate:.1f} rows/s" if rate else "scored before"),
    ]


def _facts(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    models = {name: f"fingerprint {fingerprint}" for name, fingerprint in manifest["models"].items()}
    correlation = manifest["length_correlation"]
    return {
        "Scorer": manifest["scorer"],
        "Kept": manifest["limits"],
        "Models": models,
        "Data": {
            "sources": ", ".join(source["path"] for source in manifest["data"]["sources"]),
            "fingerprint": lookup(manifest, "data.fingerprint"),
            "score and answer length": None if correlation is None else f"rank correlation {correlation:.2f}",
        },
    }
