"""Memory of training: what the backward pass keeps, and what gradients and optimizer hold.

Saved activations are the bytes that autograd holds after the forward pass, parameters left out, each storage counted
once. Gradient and optimizer bytes are those of all tensors after a step: ``.grad`` and Adam's moments. The variants are
those of ``benchmarks/variants.py``; they are measured one after the other.

Run: python benchmarks/memory.py [--quick] [--json PATH] [--dtypes float32 bfloat16]
"""

from __future__ import annotations

from collections.abc import Sequence

from claims import Claim, argument_parser, report
from variants import MODEL, Variant, build, claim_name, default_dtypes, saved_activation_bytes, sizes

VARIANTS = ("s2ft", "s2ft_fused", "id3", "random", "lora_compute", "lora_default", "full")
ACTIVATION_GOAL, STATE_GOAL = "<= 0.76", "<= 0.02"


def gradient_and_optimizer_bytes(variant: Variant) -> int:
    """Returns the bytes of gradients and optimizer state in the middle of a step."""
    import torch

    variant.model(**variant.batch).loss.backward()
    gradients = sum(p.grad.nbytes for p in variant.model.parameters() if p.grad is not None)
    variant.optimizer.step()
    states = variant.optimizer.state.values()
    held = sum(t.nbytes for state in states for t in state.values() if isinstance(t, torch.Tensor))
    variant.optimizer.zero_grad()
    return gradients + held


def measure(dtype: str, rows: int, length: int) -> list[Claim]:
    """Returns the claims for one dtype."""
    names = [name for name in VARIANTS if not (dtype == "float32" and name == "lora_default")]
    saved, held = {}, {}
    for name in names:
        variant = build(name, dtype, rows, length)
        saved[name], held[name] = saved_activation_bytes(variant), gradient_and_optimizer_bytes(variant)
        del variant
    fewest = min(saved[name] for name in names if name.startswith("lora"))
    claims = []
    for name in ("s2ft", "s2ft_fused"):
        goal = ACTIVATION_GOAL if dtype == "bfloat16" else ""
        figure = claim_name(name, f"saved_activations_over_best_lora_{dtype}")
        claims.append(Claim(figure, saved[name] / fewest, "ratio", goal, fewest))
    figure = f"id3/gradient_and_optimizer_over_full_{dtype}"
    claims.append(Claim(figure, held["id3"] / held["full"], "ratio", STATE_GOAL, held["full"]))
    for name in names:
        claims.append(Claim(claim_name(name, f"saved_activation_bytes_{dtype}"), saved[name], "bytes"))
        claims.append(Claim(claim_name(name, f"gradient_and_optimizer_bytes_{dtype}"), held[name], "bytes"))
    return claims


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each dtype and reports."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    given = parser.parse_args(arguments)
    claims = []
    for dtype in given.dtypes or default_dtypes(quick=given.quick):
        rows, length, _ = sizes(dtype, quick=given.quick)
        claims += measure(dtype, rows, length)
    report(f"memory of training {MODEL}", claims, given.json)


if __name__ == "__main__":
    main()
