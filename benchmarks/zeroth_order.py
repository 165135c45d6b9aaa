"""Time of a zeroth-order step: ``lozo`` against one forward pass, and against MeZO in place as its authors publish it.

One process, one copy of the model per variant, alternating, medians of the rounds; CPU seconds of the process, which
other processes on the machine change less than the clock on the wall. Each row has four labels, and the loss is the
lean one of ``finetune train``: the logits of all positions would cost all variants the same and hide the rest. The
baseline is MeZO's algorithm 1 in the model's dtype: ``torch.normal`` from a seed per tensor, weights moved by +eps,
-2 eps and +eps, then updated. The noise share is what a ``lozo`` step spends besides its two forward passes.

Run: python benchmarks/zeroth_order.py [--quick] [--json PATH] [--dtypes float32 bfloat16]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from claims import Claim, argument_parser, report
from variants import MODEL, default_dtypes

import finetune
from finetune.models import load_model
from finetune.training.loss import LeanLoss

EPS, RATE = 1e-3, 1e-6
# The acceptance list speaks of bfloat16 on a CPU that has it.
GOALS = {"forward": "<= 2.4", "mezo": ">= 2.5", "noise": "<= 0.15"}


def batch(rows: int, length: int) -> dict[str, Any]:
    """Returns random tokens, four of each row carrying loss."""
    ids = torch.randint(100, 40_000, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :-4] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def fresh(dtype: str) -> Any:
    """Returns the model, frozen."""
    model: Any = load_model(MODEL, dtype=dtype, device="cpu", attn_implementation="sdpa").requires_grad_(False)
    LeanLoss(model)
    return model


def published_mezo(model: Any, inputs: dict[str, Any]) -> Callable[[], None]:
    """Returns a step of MeZO as published: in place, one stream of normal numbers drawn four times."""
    weights = list(model.parameters())

    def move(seed: int, scale: float) -> None:
        torch.manual_seed(seed)
        for weight in weights:
            noise = torch.normal(0.0, 1.0, size=weight.shape, dtype=weight.dtype)
            weight.data = weight.data + scale * noise * EPS

    @torch.no_grad()
    def step() -> None:
        seed = 1234
        move(seed, 1)
        plus = float(model(**inputs).loss)
        move(seed, -2)
        minus = float(model(**inputs).loss)
        move(seed, 1)
        slope = (plus - minus) / (2 * EPS)
        torch.manual_seed(seed)
        for weight in weights:
            noise = torch.normal(0.0, 1.0, size=weight.shape, dtype=weight.dtype)
            weight.data = weight.data - RATE * (slope * noise)

    return step


def method_step(name: str, model: Any, inputs: dict[str, Any], **config: Any) -> Callable[[], None]:
    """Returns a step of one of our methods with SGD."""
    method = finetune.method(name, **config)
    model = method.attach(model)
    model.train()
    optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=RATE)

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def forward_step(model: Any, inputs: dict[str, Any]) -> Callable[[], None]:
    """Returns one forward pass with its loss."""

    @torch.no_grad()
    def step() -> None:
        model(**inputs)

    return step


def measure(dtype: str, rows: int, length: int, rounds: int) -> list[Claim]:
    """Returns the claims for one dtype."""
    inputs = batch(rows, length)
    steps = {
        "forward": forward_step(fresh(dtype), inputs),
        "lozo": method_step("lozo", fresh(dtype), inputs),
        "mezo": method_step("mezo", fresh(dtype), inputs),
        "published": published_mezo(fresh(dtype), inputs),
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if number:  # the first round warms up
                taken[name].append(time.process_time() - start)
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    forward, lozo, published = seconds["forward"], seconds["lozo"], seconds["published"]
    goals = GOALS if dtype == "bfloat16" else dict.fromkeys(GOALS, "")
    return [
        Claim(f"lozo/step_over_forward_{dtype}", lozo / forward, "ratio", goals["forward"], forward),
        Claim(f"lozo/times_faster_than_published_mezo_{dtype}", published / lozo, "ratio", goals["mezo"], published),
        Claim(f"lozo/noise_share_{dtype}", 1 - 2 * forward / lozo, "share", goals["noise"]),
        Claim(f"lozo/step_seconds_{dtype}", lozo, "seconds"),
        Claim(f"mezo/step_seconds_{dtype}", seconds["mezo"], "seconds", baseline=published),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each dtype and reports."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    given = parser.parse_args(arguments)
    rows, length, rounds = (1, 32, 2) if given.quick else (8, 128, 5)
    claims = [
        claim
        for dtype in given.dtypes or default_dtypes(quick=given.quick)
        for claim in measure(dtype, rows, length, rounds)
    ]
    report(f"one zeroth-order step of {MODEL}, {torch.get_num_threads()} threads", claims, given.json)


if __name__ == "__main__":
    main()
