"""What a frozen lower half of the model saves, with and without recomputed activations.

``top_layers`` trains the upper half of the bundled model's layers. When activations are recomputed, transformers makes
the output of the embedding require a gradient, so that the backward pass goes through the frozen half; our callback
takes that off. Both ways train the same model, alternating, one process; medians of the backward pass. Without
recomputation, the saved activations are compared with those of training everything.

Run: python benchmarks/frozen_prefix.py [--quick] [--json PATH]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from claims import Claim, argument_parser, report
from variants import MODEL, Variant, build, saved_activation_bytes

BACKWARD_GOAL = "<= 0.7"


def backward_claims(rounds: int, rows: int, length: int) -> list[Claim]:
    """Returns the backward pass without the hook of transformers as a share of that with it, and whether both agree."""
    import torch

    with_hook, without = (_recomputing(rows, length) for _ in range(2))
    without.model.disable_input_require_grads()
    for number in range(rounds + 1):
        for variant in (with_hook, without):
            loss = variant.model(**variant.batch).loss
            start = time.perf_counter()
            loss.backward()
            if number:  # the first round warms up
                variant.seconds.append(time.perf_counter() - start)
            variant.optimizer.step()
            variant.optimizer.zero_grad()
    before, after = (statistics.median(variant.seconds) for variant in (with_hook, without))
    pairs = zip(with_hook.model.parameters(), without.model.parameters(), strict=True)
    equal = float(all(torch.equal(one, other) for one, other in pairs))
    return [
        Claim("top_layers/backward_over_that_with_input_hook", after / before, "ratio", BACKWARD_GOAL, before),
        Claim("top_layers/same_weights_as_with_input_hook", equal, "share", ">= 1"),
    ]


def _recomputing(rows: int, length: int) -> Variant:
    variant = build("top_layers", "float32", rows, length)
    model: Any = variant.model
    model.activation_checkpointing_enable()
    return variant


def activation_claim(rows: int, length: int) -> Claim:
    """Returns the saved activations as a share of those of full fine-tuning."""
    full, half = (saved_activation_bytes(build(name, "float32", rows, length)) for name in ("full", "top_layers"))
    return Claim("top_layers/saved_activations_over_full", half / full, "ratio", "", full)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and reports."""
    import torch

    given = argument_parser(__doc__ or "").parse_args(arguments)
    rows, length, rounds = (1, 128, 3) if given.quick else (1, 512, 7)
    claims = [*backward_claims(rounds, rows, length), activation_claim(rows, length)]
    report(f"frozen lower half of {MODEL}, {torch.get_num_threads()} threads", claims, given.json)


if __name__ == "__main__":
    main()
