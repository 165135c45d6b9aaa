"""Whether the scores tell pairs that belong together from pairs that do not, for every scorer.

A pool of real rows holds each instruction twice: with its own answer, and with that of the next row. AUROC is the
probability that a mismatched pair looks worse than an intact one: it scores higher where the scorer measures loss, and
lower elsewhere; 0.5 is chance. The two kinds of rows are one pool, since some scorers rank rows against each other.
Rows that a scorer gives no score do not count, and are counted.

Run: python benchmarks/selection_meaning.py [--quick] [--json PATH]; needs ../shared/data.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims import Claim, argument_parser, report
from selection import BATCH_TOKENS, DATA, LONGEST, MODEL, read_pool

TARGET = DATA.parents[1] / "alpaca_judged_good" / "claude_t45.jsonl"
"""What ``rds_plus`` and ``less`` choose for: rows of the same kind that a judge liked."""
HIGHER_IS_WORSE = ("loss", "perplexity", "ifd", "r_ifd", "superfiltering")
_RATED = {"name": "selectit", "order": "example_first", "form": "chat", "assistant_prefix": "Score: "}
SCORERS: Mapping[str, Mapping[str, Any]] = {
    "random": {"name": "random"},
    "length": {"name": "length"},
    "loss": {"name": "loss"},
    "perplexity": {"name": "perplexity"},
    "ifd_ppl": {"name": "ifd"},
    "ifd_loss": {"name": "ifd", "metric": "loss"},
    "r_ifd_ppl": {"name": "r_ifd"},
    "r_ifd_loss": {"name": "r_ifd", "metric": "loss"},
    "superfiltering": {"name": "superfiltering", "model": MODEL},
    "selectit_sentence": _RATED,
    "selectit_token": {**_RATED, "num_prompts": 1},
    "deita": {"name": "deita"},
    "judge": {"name": "judge"},
    "rds_plus": {"name": "rds_plus", "target": str(TARGET), "target_rows": 20},
    "k_center": {"name": "k_center"},
    "facility_location": {"name": "facility_location"},
    "less": {
        "name": "less",
        "target": [str(TARGET)],
        "target_rows": 20,
        "warmup_epochs": 1,
        "r": 16,
        "lora_alpha": 64,
    },
}
"""One model for all, ``superfiltering`` too; ``less`` has a smaller LoRA and one epoch, not four."""


def mixed_pool(count: int, tokenizer: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns rows, and the same with each other's answers."""
    from finetune.data.records import Conversation
    from finetune.data_selection.pool import pool_of

    intact = read_pool(count, tokenizer)
    rows = [example.conversation for example in intact]
    answers = [row.messages[-1] for row in [*rows[1:], rows[0]]]
    swapped = [
        Conversation((row.messages[0], answer), row.id, row.source, row.line)
        for row, answer in zip(rows, answers, strict=True)
    ]
    return intact, pool_of(swapped, tokenizer, max_length=10 * LONGEST).examples


def load(name: str) -> Any:
    """Returns the model anew: ``less`` puts a LoRA on the one that it gets."""
    from finetune.data_selection.engine.rater import Rater
    from finetune.models import load_model, load_tokenizer

    return Rater(load_model(name, dtype="float32"), load_tokenizer(name), name)


class Measurements:
    """What scorers measure on a pool, as ``finetune select`` does it; those that measure alike share it.

    Args:
        pool: The rows.
        tokenizer: Of the model.
    """

    def __init__(self, pool: Sequence[Any], tokenizer: Any) -> None:
        self._pool, self._tokenizer = pool, tokenizer
        self._known: dict[Any, list[Any]] = {}

    def scores(self, spec: Mapping[str, Any]) -> list[float | None]:
        """Returns what each row scores; None where it has no score."""
        from finetune.data_selection import build_scorer
        from finetune.data_selection.base import Unscored

        scorer = build_scorer(spec)
        scorer.check(self._pool, self._tokenizer)
        alike = (type(scorer).measure, json.dumps({**scorer.fingerprint(), "name": ""}, sort_keys=True))
        if alike not in self._known:
            self._known[alike] = self._measure(scorer)
        measured = self._known[alike]
        scored = {place: row for place, row in enumerate(measured) if not isinstance(row, Unscored)}
        if not scored:
            return [None] * len(measured)
        found = scorer.score_pool([self._pool[place] for place in scored], list(scored.values()))
        values = {place: score.value for place, score in zip(scored, found, strict=True)}
        return [values.get(place) for place in range(len(measured))]

    def _measure(self, scorer: Any) -> list[Any]:
        from finetune.data_selection.engine.log import ScoreLog
        from finetune.data_selection.engine.run import collect, measure_pool, plan_work

        with tempfile.TemporaryDirectory() as scratch:
            log = ScoreLog(Path(scratch))
            work = plan_work(scorer, self._pool, log, model=MODEL, batch_tokens=BATCH_TOKENS)
            measure_pool(scorer, self._pool, work, log, load=load)
            return collect(log, work)


def claims_of(name: str, intact: Sequence[float | None], mismatched: Sequence[float | None]) -> list[Claim]:
    """Returns a scorer's AUROC, and on how many rows where it has no score for some."""
    one, other = ([value for value in values if value is not None] for values in (intact, mismatched))
    worse, better = (other, one) if SCORERS[name]["name"] in HIGHER_IS_WORSE else (one, other)
    goal = ">= 0.9" if name.startswith("ifd") else ""
    found = [Claim(f"{name}/auroc_mismatched_looks_worse", auroc(worse, better), "share", goal)]
    rows = len(intact) + len(mismatched)
    if len(one) + len(other) < rows:
        found.append(Claim(f"{name}/rows_with_a_score", len(one) + len(other), "rows", "", rows))
    return found


def auroc(higher: Sequence[float], lower: Sequence[float]) -> float:
    """Returns the probability that one of ``higher`` is above one of ``lower``; equal ones count half."""
    wins = [(one > other) + (one == other) / 2 for one, other in itertools.product(higher, lower)]
    return sum(wins) / len(wins) if wins else float("nan")


def answered(file: Path, folder: Path) -> Path:
    """Returns a copy of JSON Lines without the rows whose answer is empty, of which this file has two."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if json.loads(line)["output"].strip()]
    copy = folder / file.name
    copy.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return copy


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and reports."""
    import torch

    from finetune.models import load_tokenizer

    given = argument_parser(__doc__ or "").parse_args(arguments)
    if not DATA.is_file():
        sys.exit(f"error: there is no {DATA}")
    tokenizer = load_tokenizer(MODEL)
    intact, mismatched = mixed_pool(4 if given.quick else 200, tokenizer)
    measurements = Measurements([*intact, *mismatched], tokenizer)
    claims = []
    with tempfile.TemporaryDirectory() as scratch:
        target = answered(TARGET, Path(scratch))
        for name, spec in SCORERS.items():
            own = json.loads(json.dumps(spec).replace(str(TARGET), str(target)))
            found = measurements.scores(own)
            claims += claims_of(name, found[: len(intact)], found[len(intact) :])
            print(f"{claims[-1].name} {claims[-1].value:.3f}", file=sys.stderr)
    report(f"mismatched pairs with {MODEL}, {torch.get_num_threads()} threads", claims, given.json)


if __name__ == "__main__":
    main()
