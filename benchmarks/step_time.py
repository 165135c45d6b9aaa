"""Time and saved activations of a training step: S2FT, PEFT LoRA in its two forms, and full fine-tuning.

One process, the variants alternating, medians of the rounds. Every variant has the same model, batch and lean loss, so
that only the method differs. LoRA adapts all linear layers with r = 8, no dropout; ``lora_default`` keeps the adapters
in float32, as PEFT does, ``lora_compute`` in the dtype of the model: in float32 they are the same. Saved activations
are the bytes that autograd holds after the forward pass, parameters left out, each storage counted once.

Without matrix instructions for bfloat16 a CPU emulates it, some fifty times slower: rows are then fewer and shorter.

Run: python benchmarks/step_time.py [--quick] [--json PATH] [--dtypes float32 bfloat16]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from claims import Claim, argument_parser, report

MODEL = "bundled:smollm2-135m-instruct"
VARIANTS = ("s2ft", "lora_compute", "lora_default", "full")
TIME_GOAL, ACTIVATION_GOAL = "<= 0.9", "<= 0.8"
_LORA = {"name": "lora", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


@dataclass
class Variant:
    """One method on its own copy of the model."""

    step: Callable[[], None]
    saved_bytes: int
    seconds: list[float] = field(default_factory=list)


def build(name: str, dtype: str, rows: int, length: int) -> Variant:
    """Attaches a method to a fresh model and returns its training step."""
    import torch

    import finetune
    from finetune.models import load_model
    from finetune.training.loss import LeanLoss

    model: Any = load_model(MODEL, dtype=dtype, device="cpu", attn_implementation="sdpa")
    model.config.use_cache = False
    if name.startswith("lora"):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(task_type="CAUSAL_LM", **{k: v for k, v in _LORA.items() if k != "name"})
        model = get_peft_model(model, config, autocast_adapter_dtype=name == "lora_default")
    else:
        model = finetune.method(name, **({} if name == "s2ft" else {"trainable_dtype": "base"})).attach(model)
    LeanLoss(model)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(100, 40_000, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    # Few labels: the logits are the same for every method, and would hide the difference.
    labels[:, :-4] = -100

    def step() -> None:
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Variant(step, saved_activation_bytes(model, ids, labels))


def saved_activation_bytes(model: Any, ids: Any, labels: Any) -> int:
    """Returns the bytes that autograd keeps after a forward pass, parameters and buffers left out."""
    import torch

    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=labels).loss
    total = sum(kept.values())
    del loss
    return total


def measure(dtype: str, rows: int, length: int, rounds: int) -> list[Claim]:
    """Returns the claims for one dtype."""
    names = [name for name in VARIANTS if not (dtype == "float32" and name == "lora_default")]
    variants = {name: build(name, dtype, rows, length) for name in names}
    for round_number in range(rounds + 1):
        for variant in variants.values():
            start = time.perf_counter()
            variant.step()
            if round_number:  # the first round warms up
                variant.seconds.append(time.perf_counter() - start)
    seconds = {name: statistics.median(variant.seconds) for name, variant in variants.items()}
    best = min(seconds[name] for name in names if name.startswith("lora"))
    fewest = min(variant.saved_bytes for name, variant in variants.items() if name.startswith("lora"))
    s2ft = variants["s2ft"]
    claims = [
        Claim(f"s2ft/step_time_over_best_lora_{dtype}", seconds["s2ft"] / best, "ratio", TIME_GOAL, best),
        Claim(f"s2ft/step_time_over_full_{dtype}", seconds["s2ft"] / seconds["full"], "ratio", "", seconds["full"]),
        Claim(
            f"s2ft/saved_activations_over_best_lora_{dtype}",
            s2ft.saved_bytes / fewest,
            "ratio",
            ACTIVATION_GOAL,
            fewest,
        ),
    ]
    for name, variant in variants.items():
        method = name.partition("_")[0]
        form = name.removeprefix(method).lstrip("_")
        suffix = f"_{form}_{dtype}" if form else f"_{dtype}"
        claims.append(Claim(f"{method}/step_seconds{suffix}", seconds[name], "seconds"))
        claims.append(Claim(f"{method}/saved_activation_bytes{suffix}", variant.saved_bytes, "bytes"))
    return claims


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each dtype and reports."""
    import torch

    from finetune.models.dtype import best_dtype

    parser = argument_parser(__doc__ or "")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    given = parser.parse_args(arguments)
    claims = []
    for dtype in given.dtypes:
        emulated = dtype == "bfloat16" and best_dtype(torch.device("cpu")) == torch.float32
        rows, length = (1, 8) if emulated else (2, 64) if given.quick else (4, 128)
        rounds = 1 if emulated and given.quick else 3 if given.quick or emulated else 7
        claims += measure(dtype, rows, length, rounds)
    report(f"one training step of {MODEL}, {torch.get_num_threads()} threads", claims, given.json)


if __name__ == "__main__":
    main()
