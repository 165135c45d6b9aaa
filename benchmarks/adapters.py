"""What an added adapter costs beside LoRA: time of forward and backward, what is kept between them, size on disk.

All adapt every linear layer of the bundled model. LoRA has rank 16; ``lora_narrow`` holds its parameters in the base's
dtype, ``lora_wide`` is stock PEFT's default, which computes in float32 over a 16-bit base, and ``lora`` holds float32
and computes in the base's dtype, as ours do (over a float32 base the three are one). ``mos`` has LoRA's rank and an
eighth of its parameters. ``mhr`` and ``mosa`` mix or draw anew at every pass; ``mosa`` without the second pass.

One process, the adapters alternating, medians of the rounds.

Run: python benchmarks/adapters.py [--quick] [--json PATH] [--dtypes float32 bfloat16] [--methods ...]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from claims import Claim, argument_parser, report
from variants import MODEL, Variant, default_dtypes, saved_activation_bytes

_LORA = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("lora", _LORA),
    "lora_wide": ("lora", {**_LORA, "compute_dtype": "trainable"}),
    "lora_narrow": ("lora", {**_LORA, "trainable_dtype": "base"}),
    "mos": ("mos", {"r": 16, "equiv_rank": 2, "private_rank": 1, "num_shards": 4}),
    "prolora": ("prolora", {"r": 16, "num_shards": 8}),
    "pure_sharing": ("pure_sharing", {"equiv_rank": 1}),
    "mhr": ("mhr", {"r": 16, "n_skills": 8, "n_splits": 4, "tasks": ["one"]}),
    "mosa": ("mosa", {"r": 16, "gamma": 0.0}),
    "vera": ("vera", {"r": 256, "target_modules": "all-linear"}),
    "vblora": ("vblora", {"r": 4, "vector_length": 64, "num_vectors": 256, "target_modules": "all-linear"}),
    "randlora": ("randlora", {"r": 192, "target_modules": "all-linear"}),
}
_QUICK = ("lora", "mos")
LENGTHS = (16, 512)
TIME_GOAL, FILE_GOAL = "<= 1.05", "<= 0.15"


def attached(name: str, dtype: str) -> Any:
    """Returns the method, attached to a fresh model in training mode."""
    import finetune
    from finetune.models import load_model
    from finetune.training.loss import LeanLoss

    model: Any = load_model(MODEL, dtype=dtype, device="cpu", attn_implementation="sdpa")
    model.config.use_cache = False
    registered, settings = METHODS[name]
    method = finetune.method(registered, **settings)
    LeanLoss(method.attach(model))
    method.model.train()
    return method


def batch_of(length: int) -> dict[str, Any]:
    """Returns one row of that many tokens, few of which carry loss: the head costs the same for all."""
    import torch

    ids = torch.randint(100, 40_000, (1, length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :-4] = -100
    return {"input_ids": ids, "labels": labels}


def seconds_of(methods: dict[str, Any], length: int, rounds: int) -> dict[str, float]:
    """Returns the median time of forward and backward of each."""
    batch = batch_of(length)
    taken: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(rounds + 2):
        for name, method in methods.items():
            start = time.perf_counter()
            method.model(**batch).loss.backward()
            if number > 1:  # the first rounds warm up
                taken[name].append(time.perf_counter() - start)
            method.model.zero_grad()
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def saved_bytes(method: Any) -> int:
    """Returns the size of the tensors that the method saves."""
    with tempfile.TemporaryDirectory() as folder:
        method.save(folder)
        return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def measure(names: Sequence[str], dtype: str, rounds: int) -> list[Claim]:
    """Returns the claims for one dtype."""
    import torch

    methods = {name: attached(name, dtype) for name in names}
    claims = []
    for length in LENGTHS:
        seconds = seconds_of(methods, length, rounds)
        for name in names:
            goal = TIME_GOAL if name == "mos" else ""
            ratio, base = seconds[name] / seconds["lora"], seconds["lora"]
            claims.append(Claim(_named(name, f"time_over_lora_{length}_tokens_{dtype}"), ratio, "ratio", goal, base))
    sizes = {name: saved_bytes(method) for name, method in methods.items()}
    for name, method in methods.items():
        optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=0.0)
        variant = Variant(method.model, lambda: None, optimizer, batch_of(LENGTHS[-1]))
        kept, trained = saved_activation_bytes(variant), method.summary().trained
        goal = FILE_GOAL if name == "mos" else ""
        claims += [
            Claim(_named(name, f"trained_parameters_{dtype}"), trained, "parameters"),
            Claim(_named(name, f"saved_activation_bytes_{dtype}"), kept, "bytes"),
            Claim(_named(name, f"file_over_lora_{dtype}"), sizes[name] / sizes["lora"], "ratio", goal, sizes["lora"]),
        ]
    return claims


def _named(name: str, figure: str) -> str:
    """Returns ``METHOD/FORM_FIGURE``: a claim begins with the registry name of its method."""
    registered = METHODS[name][0]
    form = name.removeprefix(registered).lstrip("_")
    return f"{registered}/{form}_{figure}" if form else f"{registered}/{figure}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each dtype and reports."""
    import torch

    parser = argument_parser(__doc__ or "")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS))
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(arguments)
    names = given.methods or (_QUICK if given.quick else list(METHODS))
    names = ["lora", *(name for name in names if name != "lora")]
    claims = []
    for dtype in given.dtypes or default_dtypes(quick=given.quick):
        claims += measure(names, dtype, 3 if given.quick else given.rounds)
    report(f"adapters on {MODEL}, {torch.get_num_threads()} threads", claims, given.json)


if __name__ == "__main__":
    main()
