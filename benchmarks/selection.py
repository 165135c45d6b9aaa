"""How fast rows are scored, and how much memory the logits take.

Speed: ``selectit`` on real instruction data against the loop that is published for it (one text at a time, logits of
all positions, cache on), in float32, in one process, alternating; both orders of prompt and example, and the largest
difference between the two ways' scores. Memory: the most positions whose logits exist at a time while ``ifd`` measures.

Run: python benchmarks/selection.py [--quick] [--json PATH]; needs ../shared/data/alpaca_random.
"""

from __future__ import annotations

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
OFFICIAL_ROWS = 12
"""Rows that the published order is timed on: it has no goal, and the loop takes ten minutes for two hundred."""


def read_pool(count: int, tokenizer: Any) -> Sequence[Any]:
    """Returns the first ``count`` rows that are short enough."""
    from finetune.data.records import Conversation, Message
    from finetune.data_selection.pool import pool_of

    conversations = []
    for number, line in enumerate(DATA.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        asked = "\n".join(part for part in (row["instruction"], row["input"]) if part)
        messages = (Message("user", asked), Message("assistant", row["output"]))
        conversations.append(Conversation(messages, str(number), DATA.name, number + 1, number=number))
    return pool_of(conversations[: 10 * count], tokenizer, max_length=LONGEST).examples[:count]


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


def memory_claim(rater: Any, pool: Sequence[Any]) -> Claim:
    """Returns the most positions that reach the output head at a time, whatever the batch."""
    from finetune.data_selection import build_scorer

    positions: list[int] = []
    head = rater.model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, given: positions.append(given[0][..., 0].numel()))
    measure(build_scorer({"name": "ifd"}), rater, pool)
    hook.remove()
    return Claim("ifd/most_positions_with_logits", max(positions), "positions", "<= 256")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and reports."""
    import torch

    from finetune.data_selection.engine.rater import Rater
    from finetune.models import load_model, load_tokenizer

    given = argument_parser(__doc__ or "").parse_args(arguments)
    if not DATA.is_file():
        sys.exit(f"error: there is no {DATA}")
    rater = Rater(load_model(MODEL, dtype="float32"), load_tokenizer(MODEL), MODEL)
    pool = read_pool(2 if given.quick else 200, rater.tokenizer)
    claims = [memory_claim(rater, pool[:40])]
    claims += speed_claims(rater, pool, "example_first", ">= 3")
    claims += speed_claims(rater, pool[:OFFICIAL_ROWS], "official", "")
    report(f"data selection with {MODEL}, {torch.get_num_threads()} threads", claims, given.json)


if __name__ == "__main__":
    main()
