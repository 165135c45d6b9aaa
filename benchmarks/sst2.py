"""SST-2 in 47 steps: LoRA, S2FT and full fine-tuning of the bundled model side by side, in one process.

1,500 phrases, batch 32, one pass; scored on the 872 sentences of GLUE's development set, none of which is among them.
A phrase is asked as ``PHRASE It was``; the answer is the likelier of `` great`` and `` terrible``. Accuracy takes the
sign of the difference of the two logits; median-threshold accuracy takes the median difference of the held-out
sentences as the threshold, so that it does not see a bias towards one word.

Run: python benchmarks/sst2.py [--quick] [--json PATH] [--methods lora s2ft full]
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from claims import Claim, argument_parser, report

if TYPE_CHECKING:
    from torch import Tensor

BATCH = 32
ROWS = 1500
SEED = 0
DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "sst2"
WORDS = (" terrible", " great")


@dataclass(frozen=True)
class Setup:
    """How one method is trained: its fields, and the learning rate that suits it."""

    learning_rate: float
    fields: dict[str, Any]
    goals: dict[str, str]


SETUPS = {
    "lora": Setup(
        1e-3,
        {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        {"median_threshold_accuracy": ">= 0.84", "accuracy": ">= 0.80", "train_cpu_seconds": "<= 100"},
    ),
    "s2ft": Setup(1e-3, {"ratio": 0.02, "select": "weight"}, {}),
    "full": Setup(3e-5, {}, {}),
}


@dataclass(frozen=True)
class Phrases:
    """Token ids of prompts, and 1 for what was judged positive."""

    prompts: list[list[int]]
    labels: list[int]


def read_phrases(path: Path, tokenizer: Any, limit: int) -> Phrases:
    """Returns the first ``limit`` phrases of ``path`` as prompts."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:limit]]
    texts = [f"{row['sentence'].strip()} It was" for row in rows]
    return Phrases([list(tokenizer(text).input_ids) for text in texts], [int(row["label"]) for row in rows])


def last_logits(model: Any, prompts: Sequence[list[int]]) -> Tensor:
    """Returns the logits after each prompt, float32 (B, V); only they reach the output head."""
    import torch

    from finetune.models.batches import padded

    ids, mask = padded(prompts, 0, "left")
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, use_cache=False)
    logits: Tensor = output.logits[:, -1].float()
    return logits


def score(model: Any, phrases: Phrases, words: list[int]) -> dict[str, float]:
    """Returns accuracy and median-threshold accuracy, shares in [0, 1]."""
    from finetune.models.batches import by_length, scoring

    margins = [0.0] * len(phrases.labels)
    order = by_length([len(prompt) for prompt in phrases.prompts])
    with scoring(model):
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            logits = last_logits(model, [phrases.prompts[row] for row in batch])
            for row, margin in zip(batch, (logits[:, words[1]] - logits[:, words[0]]).tolist(), strict=True):
                margins[row] = margin

    def accuracy(threshold: float) -> float:
        right = sum((margin > threshold) == bool(label) for margin, label in zip(margins, phrases.labels, strict=True))
        return right / len(margins)

    return {"accuracy": accuracy(0.0), "median_threshold_accuracy": accuracy(statistics.median(margins))}


def train(model: Any, phrases: Phrases, words: list[int], learning_rate: float) -> dict[str, float]:
    """Trains one pass in batches of like length, AdamW with a linear decay, and returns the time that it took."""
    import torch
    import torch.nn.functional as F

    from finetune.models.batches import by_length

    order = by_length([len(prompt) for prompt in phrases.prompts])
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    random.Random(SEED).shuffle(batches)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
    model.train()
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        logits = last_logits(model, [phrases.prompts[row] for row in batch])
        targets = torch.tensor([words[phrases.labels[row]] for row in batch])
        F.cross_entropy(logits, targets).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {
        "steps": len(batches),
        "train_seconds": time.perf_counter() - wall,
        "train_cpu_seconds": time.process_time() - cpu,
    }


def measure(name: str, model_name: str, train_rows: Phrases, test_rows: Phrases, words: list[int]) -> list[Claim]:
    """Returns the claims of one method, with what the untouched model scores as the baseline."""
    import torch

    import finetune
    from finetune.models import load_model

    torch.manual_seed(SEED)
    setup = SETUPS[name]
    # On short rows on a CPU eager attention is faster than sdpa, for every method alike.
    base = load_model(model_name, dtype="float32", device="cpu", attn_implementation="eager")
    before = score(base, test_rows, words)
    method = finetune.method(name, **setup.fields)
    model = method.attach(base)
    figures = train(model, train_rows, words, setup.learning_rate)
    after = score(model, test_rows, words)
    summary = method.summary()
    units = {"steps": "steps", "train_seconds": "seconds", "train_cpu_seconds": "seconds"}
    claims = [
        Claim(f"{name}/{figure}", value, "share", setup.goals.get(figure, ""), before[figure])
        for figure, value in after.items()
    ]
    claims += [Claim(f"{name}/{key}", value, units[key], setup.goals.get(key, "")) for key, value in figures.items()]
    return [*claims, Claim(f"{name}/trained_parameters", summary.trained, "parameters", "", summary.total)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the methods one after the other and reports."""
    from finetune.models import load_tokenizer

    parser = argument_parser(__doc__ or "")
    parser.add_argument("--methods", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct", help="a causal LM")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with SST-2's train.jsonl and test.jsonl")
    given = parser.parse_args(arguments)
    if not (given.data / "train.jsonl").is_file():
        parser.error(f"no train.jsonl in {given.data}; name the folder with --data")
    tokenizer = load_tokenizer(given.model)
    words = [tokenizer(word, add_special_tokens=False).input_ids[0] for word in WORDS]
    if words[0] == words[1]:
        parser.error(f"the tokenizer of {given.model} begins {WORDS[0]!r} and {WORDS[1]!r} with the same token")
    train_rows = read_phrases(given.data / "train.jsonl", tokenizer, 3 * BATCH if given.quick else ROWS)
    test_rows = read_phrases(given.data / "test.jsonl", tokenizer, 2 * BATCH if given.quick else ROWS)
    claims = []
    for name in given.methods:
        claims += measure(name, given.model, train_rows, test_rows, words)
    title = f"SST-2: {len(train_rows.labels)} phrases, batch {BATCH}, {len(test_rows.labels)} held out"
    report(title, claims, given.json)


if __name__ == "__main__":
    main()
