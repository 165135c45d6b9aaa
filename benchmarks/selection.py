"""How fast rows are scored, and whether the scores tell pairs that belong together from pairs that do not.

Speed: ``selectit`` on real instruction data against the loop that is published for it (one text at a time, logits of
all positions, cache on), in float32, in one process, alternating; both orders of prompt and example, and the largest
difference between the two ways' scores. Meaning: every row gets the answer of the next one, and AUROC is the
probability that a mismatched pair looks worse than an intact one: scores higher by ifd, r_ifd and loss, lower by
selectit. Memory: the most positions whose logits exist at a time.

Run: python benchmarks/selection.py [--quick] [--json PATH]; needs ../shared/data/alpaca_random.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from claims import Claim, argument_parser, report

MODEL = "bundled:smollm2-135m-instruct"
DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "alpaca_random" / "train.jsonl"
LONGEST = 256
"""Tokens of the longest rows that are taken: two cores score thousands of tokens in a minute, not more."""
BATCH_TOKENS = 2048
MEANING: dict[str, dict[str, Any]] = {
    "ifd_ppl": {"name": "ifd"},
    "ifd_loss": {"name": "ifd", "metric": "loss"},
    "r_ifd_ppl": {"name": "r_ifd"},
    "r_ifd_loss": {"name": "r_ifd", "metric": "loss"},
    "loss": {"name": "loss"},
    "superfiltering": {"name": "superfiltering", "model": MODEL},
    "selectit": {"name": "selectit", "order": "example_first", "form": "chat", "assistant_prefix": "Score: "},
}
"""What is asked to tell mismatched pairs from intact ones; ``superfiltering`` reads bare text, with the same model."""
HIGHER_IS_BETTER = ("selectit",)
OFFICIAL_ROWS = 12
"""Rows that the published order is timed on: it has no goal, and the loop takes ten minutes for two hundred."""


def read_pool(count: int, tokenizer: Any, *, shuffled: bool = False) -> Sequence[Any]:
    """Returns the first ``count`` rows that are short enough; shuffled ones have the answer of the next row."""
    from finetune.data.records import Conversation, Message
    from finetune.data_selection.pool import pool_of

    conversations = []
    for number, line in enumerate(DATA.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        asked = "\n".join(part for part in (row["instruction"], row["input"]) if part)
        messages = (Message("user", asked), Message("assistant", row["output"]))
        conversations.append(Conversation(messages, str(number), DATA.name, number + 1, number=number))
    usable = pool_of(conversations[: 10 * count], tokenizer, max_length=LONGEST).examples[:count]
    if not shuffled:
        return usable
    rows = [example.conversation for example in usable]
    answers = [row.messages[-1] for row in [*rows[1:], rows[0]]]
    swapped = [
        Conversation((row.messages[0], answer), row.id, row.source, row.line)
        for row, answer in zip(rows, answers, strict=True)
    ]
    return pool_of(swapped, tokenizer, max_length=10 * LONGEST).examples


def measure(scorer: Any, rater: Any, pool: Sequence[Any]) -> list[Any]:
    """Returns what is measured on a pool, in batches as ``finetune select`` does it."""
    from finetune.data_selection.engine.batches import plan_batches

    evidence: dict[int, Any] = {}
    for batch in plan_batches([example.tokens for example in pool], BATCH_TOKENS):
        evidence.update(zip(batch, scorer.measure(rater, [pool[place] for place in batch]), strict=True))
    return [evidence[place] for place in range(len(pool))]


def scores(scorer: Any, pool: Sequence[Any], evidence: Sequence[Any]) -> list[float]:
    """Returns the scores of a pool that was measured."""
    return [score.value for score in scorer.score_pool(pool, [[found] for found in evidence])]


def published_loop(rater: Any, pool: Sequence[Any], order: str) -> list[float]:
    """Scores as the published code runs: one text at a time, all logits, cache on; arithmetic as in the paper."""
    import torch

    from finetune.data_selection.rating.prompts import RatingForm, read_prompts
    from finetune.data_selection.rating.uncertainty import rating_shares, sentence_level, token_level

    form = RatingForm(order, chat=False, cue="The answer is: \n", assistant_prefix="")  # type: ignore[arg-type]
    digits = [rater.tokenizer("\n" + str(k), add_special_tokens=False)["input_ids"][-1] for k in range(1, 6)]
    scores = []
    for example in pool:
        by_prompt = []
        for prompt in read_prompts(None, 5, 5):
            text = form.text(prompt, example.exchanges[0], rater.tokenizer)
            with torch.no_grad():
                logits = rater.model(**rater.tokenizer(text, return_tensors="pt")).logits[0, -1].float()
            by_prompt.append(token_level(rating_shares(logits[digits].log_softmax(0).tolist())))
        scores.append(sentence_level(by_prompt))
    return scores


def speed_claims(rater: Any, pool: Sequence[Any], order: str, goal: str) -> list[Claim]:
    """Returns the speed of ``selectit`` as a multiple of the published loop's, and how far the scores are apart.

    What happens once at the start, whatever the number of rows, is not timed: tokens of the ratings, and the probe.
    """
    from finetune.data_selection import build_scorer

    scorer = build_scorer({"name": "selectit", "order": order})
    scorer.begin(rater, pool)
    seconds = [0.0, 0.0]
    differences = []
    half = len(pool) // 2
    for part in (pool[:half], pool[half:]):
        found = []
        ways = (
            lambda part=part: published_loop(rater, part, order),
            lambda part=part: scores(scorer, part, measure(scorer, rater, part)),
        )
        for place, way in enumerate(ways):
            start = time.perf_counter()
            found.append(way())
            seconds[place] += time.perf_counter() - start
        differences += [abs(one - other) for one, other in zip(*found, strict=True)]
    loop, ours = (len(pool) / taken for taken in seconds)
    return [
        Claim(f"selectit/rows_per_second_{order}", ours, "rows/s", "", loop),
        Claim(f"selectit/speed_over_published_loop_{order}", ours / loop, "ratio", goal),
        Claim(f"selectit/largest_score_difference_{order}", max(differences), "score", "<= 1e-5"),
    ]


def meaning_claims(rater: Any, count: int, names: Sequence[str]) -> list[Claim]:
    """Returns AUROC of mismatched against intact pairs, by scorer; the loss is what training sees."""
    from finetune.data_selection import build_scorer

    pools = [read_pool(count, rater.tokenizer, shuffled=shuffled) for shuffled in (True, False)]
    measured: dict[str, list[Any]] = {}
    claims = []
    for name in names:
        scorer = build_scorer(MEANING[name])
        known = json.dumps(scorer.fingerprint(), sort_keys=True)
        if known not in measured:
            measured[known] = []
            for pool in pools:
                scorer.begin(rater, pool)
                measured[known].append(measure(scorer, rater, pool))
        found = [scores(scorer, pool, rows) for pool, rows in zip(pools, measured[known], strict=True)]
        # What is kept at the high end is better the higher it is: there a mismatched pair should be the lower one.
        worse, better = found if name not in HIGHER_IS_BETTER else found[::-1]
        goal = ">= 0.9" if name.startswith("ifd") else ""
        claims.append(Claim(f"{name}/auroc_mismatched_over_intact", auroc(worse, better), "share", goal))
    return claims


def auroc(higher: Sequence[float], lower: Sequence[float]) -> float:
    """Returns the probability that one of ``higher`` is above one of ``lower``; equal ones count half."""
    wins = [(one > other) + (one == other) / 2 for one, other in itertools.product(higher, lower)]
    return sum(wins) / len(wins)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and reports."""
    import torch

    from finetune.data_selection.engine.rater import Rater
    from finetune.models import load_model, load_tokenizer

    given = argument_parser(__doc__ or "").parse_args(arguments)
    if not DATA.is_file():
        sys.exit(f"error: there is no {DATA}")
    rater = Rater(load_model(MODEL, dtype="float32"), load_tokenizer(MODEL), MODEL)
    positions: list[int] = []
    rater.model.lm_head.register_forward_pre_hook(lambda module, given: positions.append(given[0][..., 0].numel()))
    claims = meaning_claims(rater, 4 if given.quick else 200, list(MEANING))
    claims.append(Claim("ifd/most_positions_with_logits", max(positions), "positions", "<= 256"))
    pool = read_pool(2 if given.quick else 200, rater.tokenizer)
    claims += speed_claims(rater, pool, "example_first", ">= 3")
    claims += speed_claims(rater, pool[:OFFICIAL_ROWS], "official", "")
    report(f"data selection with {MODEL}, {torch.get_num_threads()} threads", claims, given.json)


if __name__ == "__main__":
    main()
