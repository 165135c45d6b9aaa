"""What a selection leaves: a table of scores, the subset, and a record of how both came about."""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.errors import DataError
from finetune.core.files import hash_file, replaced_file, replaced_folder, write_json, write_text
from finetune.data.subset import subset_name, write_subset
from finetune.data_selection.base import Evidence, Score, Unscored
from finetune.data_selection.choice.diversity import SimilarityFilter
from finetune.data_selection.choice.duplicates import (
    DuplicateFilter,
    exact_clusters,
    near_clusters,
    normalized_text,
)
from finetune.data_selection.choice.rules import Candidate, Rule, choose
from finetune.data_selection.engine.embeddings import unpacked
from finetune.environment import toolkit_version
from finetune.selection.folder import SelectionFolder
from finetune.selection.plan import SelectionPlan
from finetune.selection.reasons import reasons_in_words, what_helps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from finetune.data.records import DataSource
    from finetune.data_selection.pool import Example, Pool

__all__ = ["Selection", "select_rows", "subset_names", "write_dropped", "write_selection"]

_PACKAGES = ("torch", "transformers", "datasets", "tokenizers")


@dataclass(frozen=True)
class Selection:
    """Which rows are kept.

    Attributes:
        plan: What was asked for.
        measured: For each row what was measured on it, one entry per model, or why nothing was.
        scores: Position of a row that was scored -> its score.
        chosen: Positions of the rows that are kept, the best first.
        left_out: Position of a row that was scored and is not kept -> why.
    """

    plan: SelectionPlan
    measured: Sequence[Sequence[Evidence] | Unscored]
    scores: Mapping[int, Score]
    chosen: Sequence[int]
    left_out: Mapping[int, str]

    @property
    def examples(self) -> Sequence[Example]:
        """All rows."""
        return self.plan.pool.examples

    @cached_property
    def unscored(self) -> dict[int, Unscored]:
        """Position of a row without a score -> why."""
        return {place: row for place, row in enumerate(self.measured) if isinstance(row, Unscored)}

    def tokens(self, positions: Sequence[int] | None = None) -> int:
        """Returns the tokens of the rows at ``positions``; None is all."""
        rows = range(len(self.examples)) if positions is None else positions
        return sum(self.examples[position].tokens for position in rows)

    def values(self, positions: Sequence[int] | None = None) -> list[float]:
        """Returns the scores at ``positions``; None is all that were scored."""
        return [self.scores[position].value for position in (self.scores if positions is None else positions)]


def select_rows(
    plan: SelectionPlan,
    measured: Sequence[Sequence[Evidence] | Unscored],
    vectors: Sequence[Sequence[Evidence] | Unscored] | None = None,
) -> Selection:
    """Turns measurements into scores, and scores into the rows that are kept.

    Args:
        plan: What was asked for.
        measured: What the scorer measured on each row.
        vectors: What :class:`Embeddings` measured; for rules that compare rows.

    Raises:
        DataError: No row has a score, or none is kept.
    """
    examples = plan.pool.examples
    places = [place for place, row in enumerate(measured) if not isinstance(row, Unscored)]
    evidence = [row for row in measured if not isinstance(row, Unscored)]
    if not evidence:
        reasons = [(row.reason, row.detail) for row in measured if isinstance(row, Unscored)]
        raise DataError(
            "no row has a score",
            where="select.scorer",
            got=reasons_in_words(reasons),
            fix=what_helps(reasons, "another scorer or model"),
        )
    found = plan.scorer.score_pool([examples[place] for place in places], evidence)
    scores = dict(zip(places, found, strict=True))
    candidates = [
        Candidate(
            place,
            examples[place].key,
            _uncontaminated(plan, examples[place], score),
            examples[place].tokens,
            plan.source_of(examples[place]),
        )
        for place, score in scores.items()
    ]
    chosen, left_out = choose(candidates, plan.limits, direction=plan.direction, rules=_rules(plan, vectors))
    return Selection(plan, measured, scores, chosen, left_out)


def _uncontaminated(plan: SelectionPlan, example: Example, score: Score) -> Score:
    """Returns the score, of a row that shares words with evaluation data with that as the reason not to keep it."""
    row = example.conversation
    said = [message.content for message in row.messages] or [row.text]
    reason = plan.contamination(said) if plan.contamination is not None else ""
    return replace(score, excluded=reason) if reason else score


def _rules(plan: SelectionPlan, vectors: Sequence[Sequence[Evidence] | Unscored] | None) -> list[Rule]:
    """Returns the rules that look at the rows chosen before."""
    section = plan.recipe.select
    texts = [normalized_text(example) for example in plan.pool.examples] if section.duplicates != "keep" else []
    rules: list[Rule] = []
    if section.duplicates == "exact":
        rules.append(DuplicateFilter(exact_clusters(texts)))
    elif section.duplicates == "near":
        rules.append(DuplicateFilter(near_clusters(texts, section.duplicate_threshold)))
    if section.diversity is not None and vectors is not None:
        rules.append(SimilarityFilter(_matrix(vectors), section.diversity))
    return rules


def _matrix(vectors: Sequence[Sequence[Evidence] | Unscored]) -> NDArray[np.float32]:
    """Returns the vectors as rows; a row without one is zero, like none."""
    import numpy as np

    known = {place: row[0]["vector"] for place, row in enumerate(vectors) if not isinstance(row, Unscored)}
    found = unpacked(list(known.values()))
    matrix = np.zeros((len(vectors), found.shape[1]), dtype=np.float32)
    matrix[list(known)] = found
    return matrix


def write_selection(selection: Selection, folder: SelectionFolder, *, about: Mapping[str, Any]) -> dict[str, Any]:
    """Writes scores, dropped rows, subset and manifest, and returns the manifest.

    Args:
        selection: What was chosen.
        folder: Where to.
        about: What the manifest says of the run besides: models, seconds, warnings.
    """
    _write_scores(selection, folder.scores)
    dropped = write_dropped(selection.plan.pool, folder)
    files = _write_subsets(selection, folder.selected)
    manifest = {**_manifest(selection), **about}
    written = [folder.scores, dropped, *files]
    manifest["files"] = {
        file.relative_to(folder.path).as_posix(): hash_file(file) if file.is_file() else None for file in written
    }
    write_json(folder.manifest, manifest)
    return manifest


def write_dropped(pool: Pool, folder: SelectionFolder) -> Path:
    """Writes the rows that could not be used, with the reason of each, and returns the file."""
    lines = [json.dumps(vars(row), ensure_ascii=False) + "\n" for row in pool.dropped]
    write_text(folder.dropped, "".join(lines))
    return folder.dropped


def _write_scores(selection: Selection, path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    ranks = {position: rank for rank, position in enumerate(selection.chosen, 1)}
    rows = []
    for position, example in enumerate(selection.examples):
        row, score = example.conversation, selection.scores.get(position)
        failed = selection.unscored.get(position)
        rows.append(
            {
                "row": row.number,
                "id": row.id,
                "key": example.key,
                "source": row.source,
                "line": row.line,
                "tokens": example.tokens,
                "answer_tokens": example.answer_tokens,
                "score": None if score is None else score.value,
                "kept": position in ranks,
                "rank": ranks.get(position),
                "left_out": failed.reason if failed else selection.left_out.get(position, ""),
                "detail": failed.detail if failed else "",
                **_evidence_columns(selection.measured[position], selection.plan.scorer.unlisted),
            }
        )
    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    with replaced_file(path) as beside:
        pyarrow.parquet.write_table(table, beside)


def _evidence_columns(measured: Sequence[Evidence] | Unscored, unlisted: Container[str]) -> dict[str, Any]:
    """Returns what was measured; a second model's columns end in ``_2``."""
    if isinstance(measured, Unscored):
        return {}
    return {
        name if number == 1 else f"{name}_{number}": value
        for number, evidence in enumerate(measured, 1)
        for name, value in evidence.items()
        if name not in unlisted
    }


def _write_subsets(selection: Selection, target: Path) -> list[Path]:
    """Writes one subset per source, its rows in their order in the source."""
    sources = selection.plan.recipe.data.train
    numbers: dict[str, list[int]] = {source.path: [] for source in sources}
    for position in sorted(selection.chosen):
        row = selection.examples[position].conversation
        numbers[row.source].append(row.number)
    written = []
    with replaced_folder(target) as beside:
        for source, name in zip(sources, subset_names(sources), strict=True):
            if numbers[source.path]:
                write_subset(source, numbers[source.path], beside / name)
                written.append(target / name)
    return written


def subset_names(sources: Sequence[DataSource]) -> list[str]:
    """Returns what the subset of each source is called, told apart by a number where two would be called the same."""
    names = [subset_name(source) for source in sources]
    twice = len(set(names)) < len(names)
    return [f"{place}-{name}" if twice else name for place, name in enumerate(names, 1)]


def _manifest(selection: Selection) -> dict[str, Any]:
    plan = selection.plan
    recipe, scorer, dropped = plan.recipe, plan.scorer, plan.pool.dropped
    config = {**scorer.config.model_dump(mode="json"), **scorer.about()}
    section = recipe.select.model_dump(mode="json", exclude={"scorer", "batch_tokens"})
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "finetune": toolkit_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "scorer": {"name": scorer.name, "paper": scorer.paper, **config},
        "limits": {**section, "keep": plan.direction},
        "data": {
            "sources": [source.model_dump(mode="json") for source in recipe.data.train],
            "fingerprint": plan.pool.fingerprint,
        },
        "counts": {
            "read": len(selection.examples) + len(dropped),
            "dropped": dict(Counter(row.reason for row in dropped)),
            "unscored": dict(Counter(row.reason for row in selection.unscored.values())),
            "left_out": dict(Counter(selection.left_out.values())),
            "scored": len(selection.scores),
            "kept": len(selection.chosen),
        },
        "tokens": {"pool": selection.tokens(), "kept": selection.tokens(selection.chosen)},
        "score": {"pool": _spread(selection.values()), "kept": _spread(selection.values(selection.chosen))},
        "length_correlation": _length_correlation(selection),
        "spent": scorer.spent(selection.measured),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"lowest": min(values), "median": statistics.median(values), "highest": max(values)}


def _length_correlation(selection: Selection) -> float | None:
    """Returns Spearman's correlation of score and answer length, or None where one of them never changes."""
    import numpy as np

    lengths = [selection.examples[position].answer_tokens for position in selection.scores]
    values = selection.values()
    if len(set(lengths)) < 2 or len(set(values)) < 2:
        return None
    return float(np.corrcoef(_ranks(lengths), _ranks(values))[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Returns ascending ranks, equal values sharing the mean of theirs."""
    import numpy as np

    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks
