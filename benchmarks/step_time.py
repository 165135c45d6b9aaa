"""Time of a training step: S2FT, ID3, a random mask, PEFT LoRA in its two forms, and full fine-tuning.

One process, the variants (``benchmarks/variants.py``) alternating, medians of the rounds.

Run: python benchmarks/step_time.py [--quick] [--json PATH] [--dtypes float32 bfloat16] [--variants ...]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from claims import Claim, argument_parser, report
from variants import MODEL, build, claim_name, default_dtypes, sizes

VARIANTS = ("s2ft", "s2ft_fused", "id3", "id3_every_10", "random", "lora_compute", "lora_default", "full")
QUICK = ("s2ft", "id3", "lora_compute", "lora_default", "full")
S2FT_GOAL = {"float32": "<= 0.85", "bfloat16": "<= 0.81"}
ID3_GOAL = "<= 0.8"


def measure(variants: Sequence[str], dtype: str, rows: int, length: int, rounds: int) -> list[Claim]:
    """Returns the claims for one dtype."""
    names = [name for name in variants if not (dtype == "float32" and name == "lora_default")]
    built = {name: build(name, dtype, rows, length) for name in names}
    for round_number in range(rounds + 1):
        for variant in built.values():
            start = time.perf_counter()
            variant.step()
            if round_number:  # the first round warms up
                variant.seconds.append(time.perf_counter() - start)
    seconds = {name: statistics.median(variant.seconds) for name, variant in built.items()}
    claims = []
    loras = [seconds[name] for name in names if name.startswith("lora")]
    for name in names:
        if loras and name.startswith("s2ft"):
            ratio, goal = seconds[name] / min(loras), S2FT_GOAL[dtype] if name == "s2ft" else ""
            claims.append(
                Claim(claim_name(name, f"step_time_over_best_lora_{dtype}"), ratio, "ratio", goal, min(loras))
            )
        if "full" in seconds and name != "full":
            ratio, goal = seconds[name] / seconds["full"], ID3_GOAL if name == "id3" else ""
            figure = claim_name(name, f"step_time_over_full_{dtype}")
            claims.append(Claim(figure, ratio, "ratio", goal, seconds["full"]))
    return [*claims, *(Claim(claim_name(name, f"step_seconds_{dtype}"), seconds[name], "seconds") for name in names)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each dtype and reports."""
    import torch

    parser = argument_parser(__doc__ or "")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    given = parser.parse_args(arguments)
    variants = given.variants or (QUICK if given.quick else VARIANTS)
    claims = []
    for dtype in given.dtypes or default_dtypes(quick=given.quick):
        claims += measure(variants, dtype, *sizes(dtype, quick=given.quick))
    report(f"one training step of {MODEL}, {torch.get_num_threads()} threads", claims, given.json)


if __name__ == "__main__":
    main()
