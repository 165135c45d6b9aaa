"""Quality at equal numbers of trained parameters, on two real tasks, over several seeds: who wins, as it is.

``sst2``: is a film phrase good or bad; accuracy of the likelier of two words. ``banking_cards``: which of the eleven
intents of BANKING77 that begin with "card" a customer has; exact match of the intent's greedily generated name. The
bundled model trains one pass over a sample of the training data with AdamW and a linear decay. ``s2ft``, ``id3``,
``random``, ``magnitude`` and ``lora`` (r = 8 on all linear layers) train the same number of parameters, ``full`` all of
them; ``spectrum_25``, its controls and ``top_layers_half`` a quarter or half of the block weights, ``lisa`` two layers
at a time. Each has one learning rate for both tasks: ``id3`` and ``random`` the better of 3e-4 and 1e-3 on 320 other
rows of ``sst2``, ``magnitude`` that of ``random``, ``spectrum_25`` and with it its relatives the best of 3e-5, 1e-4,
3e-4 and 1e-3 there, ``lisa`` of 3e-4, 1e-3 and 3e-3, ``cofitune`` of 3e-4 and 1e-3, ``mos_eighth`` and
``lora_eighth`` of 1e-3, 3e-3 and 1e-2, ``vera`` and ``vblora`` of 3e-3, 1e-2 and 3e-2, ``randlora`` of 3e-4, 1e-3 and
3e-3, the others that of ``sst2.py``;
``--search`` tries more.

Needs ``../shared/data``. Run: python benchmarks/quality.py [--quick] [--json PATH] [--methods ...] [--seeds 3]
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claims import Claim, argument_parser, report

MODEL = "bundled:smollm2-135m-instruct"
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
BATCH = 16
TRAINED = 2_442_240
"""Parameters of LoRA with r = 8 on all linear layers of the bundled model."""
IGNORED = -100
TASKS = ["sst2", "banking_cards"]


@dataclass(frozen=True)
class Setup:
    """How one method is trained.

    Attributes:
        method: Its registry name.
        learning_rate: Of AdamW.
        fields: Of its config.
        seeded: Whether what it chooses depends on the seed.
    """

    method: str
    learning_rate: float
    fields: dict[str, Any]
    seeded: bool = False


SETUPS = {
    "lora": Setup("lora", 1e-3, {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}),
    # Whole columns: 0.2 % fewer parameters.
    "s2ft": Setup("s2ft", 1e-3, {"ratio": TRAINED / 106_168_320}, seeded=True),
    "id3": Setup("id3", 3e-4, {"budget": TRAINED}),
    "random": Setup("random", 1e-3, {"budget": TRAINED}, seeded=True),
    "magnitude": Setup("magnitude", 1e-3, {"budget": TRAINED}),
    "full": Setup("full", 3e-5, {}),
    "spectrum_25": Setup("spectrum", 3e-4, {"top_percent": 25}),
    "spectrum_50": Setup("spectrum", 3e-4, {"top_percent": 50}),
    "spectrum_median_25": Setup("spectrum", 3e-4, {"top_percent": 25, "threshold": "median"}),
    "spectrum_random_25": Setup("spectrum", 3e-4, {"top_percent": 25, "order": "random"}, seeded=True),
    "top_layers_half": Setup("top_layers", 3e-4, {"count": 0.5}),
    # Up and down projections of the second quarter, unmasked.
    "cofitune": Setup("cofitune", 3e-4, {"soft_mask": False}),
    # An eighth of what "lora" trains: pools that all layers of a kind draw from, or rank 1.
    "mos_eighth": Setup("mos", 3e-3, {"r": 8, "equiv_rank": 1, "private_rank": 0, "num_shards": 4}, seeded=True),
    "lora_eighth": Setup("lora", 3e-3, {"r": 1, "lora_alpha": 2, "target_modules": "all-linear"}),
    "vera": Setup("vera", 3e-2, {"r": 256, "target_modules": "all-linear"}),
    "vblora": Setup(
        "vblora", 1e-2, {"r": 4, "vector_length": 64, "num_vectors": 256, "topk": 2, "target_modules": "all-linear"}
    ),
    "randlora": Setup("randlora", 1e-3, {"r": 192, "target_modules": "all-linear"}),
    # A run of 30 steps draws six times.
    "lisa": Setup("lisa", 1e-3, {"layers": 2, "interval": 5}, seeded=True),
}


@dataclass(frozen=True)
class Row:
    """A prompt and the right answer, in words."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """Rows to train on and rows to score on.

    Attributes:
        answers: All answers that there are, where they differ in their first token; None where they are generated.
    """

    name: str
    train: list[Row]
    test: list[Row]
    answers: list[str] | None = None


def read_sst2(part: str, count: int) -> list[Row]:
    """Returns phrases with what they say of a film."""
    rows = _read(DATA / "sst2" / f"{part}.jsonl")[:count]
    return [Row(f"{row['sentence'].strip()} It was", " great" if row["label"] else " terrible") for row in rows]


def read_banking(part: str, count: int) -> list[Row]:
    """Returns questions with the names of their intents, a sample over those that begin with "card"."""
    rows = [row for row in _read(DATA / "banking77" / f"{part}.jsonl") if row["category"].startswith("card_")]
    random.Random(0).shuffle(rows)
    return [Row(f"{row['text'].strip()}\nIntent:", " " + row["category"].replace("_", " ")) for row in rows[:count]]


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_tasks(train_rows: int, test_rows: int) -> list[Task]:
    """Returns both tasks."""
    return [
        Task("sst2", read_sst2("train", train_rows), read_sst2("test", test_rows), [" terrible", " great"]),
        Task("banking_cards", read_banking("train", train_rows), read_banking("test", test_rows)),
    ]


def train(model: Any, method: Any, rows: list[Row], tokenizer: Any, learning_rate: float, seed: int) -> float:
    """Trains one pass and returns its seconds; only the answers carry loss."""
    import torch

    from finetune.models.batches import by_length, padded
    from finetune.training.loss import LeanLoss

    examples = [(tokenizer(row.prompt).input_ids, tokenizer(row.answer).input_ids) for row in rows]
    examples = [(prompt, [*answer, tokenizer.eos_token_id]) for prompt, answer in examples]
    order = by_length([len(prompt) + len(answer) for prompt, answer in examples])
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    random.Random(seed).shuffle(batches)
    method.bind(total_steps=len(batches))
    trained = list(method.trained_parameters().values())
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
    lean = LeanLoss(model)
    model.train()
    start = time.perf_counter()
    for batch in batches:
        rows_now = [examples[number] for number in batch]
        ids, mask = padded([[*prompt, *answer] for prompt, answer in rows_now], tokenizer.eos_token_id, "right")
        labels, _ = padded([[IGNORED] * len(prompt) + answer for prompt, answer in rows_now], IGNORED, "right")
        model(input_ids=ids, labels=labels, attention_mask=mask).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    lean.remove()
    return time.perf_counter() - start


def score(model: Any, task: Task, tokenizer: Any) -> float:
    """Returns the share of test rows that are right."""
    import torch

    from finetune.models.batches import by_length, padded, scoring

    prompts = [tokenizer(row.prompt).input_ids for row in task.test]
    order, right = by_length([len(prompt) for prompt in prompts]), 0
    firsts = None if task.answers is None else [tokenizer(answer).input_ids[0] for answer in task.answers]
    with scoring(model), torch.no_grad():
        for start in range(0, len(order), 2 * BATCH):
            batch = order[start : start + 2 * BATCH]
            ids, mask = padded([prompts[number] for number in batch], tokenizer.eos_token_id, "left")
            if firsts is not None:
                logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=1).logits[:, -1, firsts]
                found = [task.answers[best] for best in logits.argmax(-1).tolist()]  # type: ignore[index]
            else:
                out = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=10,
                    do_sample=False,
                    pad_token_id=tokenizer.eos_token_id,
                )
                found = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
            pairs = zip(batch, found, strict=True)
            right += sum(answer.strip() == task.test[number].answer.strip() for number, answer in pairs)
    return right / len(order)


def run(name: str, task: Task, tokenizer: Any, *, seed: int, learning_rate: float | None = None) -> dict[str, float]:
    """Trains one method on one task from the untouched model, and returns accuracy, seconds, and what trained."""
    import torch

    import finetune
    from finetune.models import load_model

    torch.manual_seed(seed)
    setup = SETUPS[name]
    fields = {**setup.fields, **({"seed": seed} if setup.seeded else {})}
    base = load_model(MODEL, dtype="float32", device="cpu", attn_implementation="sdpa")
    method = finetune.method(setup.method, **fields)
    model = method.attach(base)
    rate = setup.learning_rate if learning_rate is None else learning_rate
    seconds = train(model, method, task.train, tokenizer, rate, seed)
    return {"accuracy": score(model, task, tokenizer), "seconds": seconds, "trained": method.summary().trained}


def search(tokenizer: Any, methods: Sequence[str], rates: Sequence[float]) -> None:
    """Prints the development accuracy of each method by learning rate."""
    task = Task("sst2", read_sst2("train", 320), read_sst2("dev", 400), [" terrible", " great"])
    for name in methods:
        for rate in rates:
            print(name, rate, run(name, task, tokenizer, seed=100, learning_rate=rate), flush=True)


def claims_of(name: str, task: Task, results: list[dict[str, float]], before: float) -> list[Claim]:
    """Returns mean and spread of one method on one task."""
    accuracies = [result["accuracy"] for result in results]
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    figures: dict[str, tuple[float, str]] = {
        "accuracy_mean": (statistics.mean(accuracies), "share"),
        "accuracy_stdev": (spread, "share"),
        "accuracy_lowest": (min(accuracies), "share"),
        "accuracy_highest": (max(accuracies), "share"),
        "train_seconds": (statistics.median(result["seconds"] for result in results), "seconds"),
        "trained_parameters": (results[0]["trained"], "parameters"),
    }
    return [
        Claim(f"{_claimed(name)}{task.name}_{figure}", value, unit, "", before if figure == "accuracy_mean" else None)
        for figure, (value, unit) in figures.items()
    ]


def _claimed(name: str) -> str:
    """Returns ``METHOD/FORM_``: a claim begins with the registry name of its method."""
    method = SETUPS[name].method
    form = name.removeprefix(method).lstrip("_")
    return f"{method}/{form}_" if form else f"{method}/"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each method on both tasks over the seeds, and reports after each."""
    from finetune.models import load_model, load_tokenizer

    parser = argument_parser(__doc__ or "")
    parser.add_argument("--methods", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--search", action="store_true", help="prints the accuracy by learning rate instead")
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-5, 1e-4, 3e-4, 1e-3, 3e-3], help="for --search")
    given = parser.parse_args(arguments)
    if not DATA.is_dir():
        parser.error(f"{DATA} is not there: the tasks need its data")
    tokenizer = load_tokenizer(MODEL)
    if given.search:
        search(tokenizer, given.methods, given.rates)
        return
    tasks = make_tasks(2 * BATCH, 2 * BATCH) if given.quick else make_tasks(480, 300)
    methods = given.methods[:2] if given.quick and given.methods == list(SETUPS) else given.methods
    claims: list[Claim] = []
    for task in (task for task in tasks if task.name in given.tasks):
        before = score(load_model(MODEL, dtype="float32", device="cpu"), task, tokenizer)
        for name in methods:
            seeds = range(1 if given.quick else given.seeds)
            results = [run(name, task, tokenizer, seed=seed) for seed in seeds]
            claims += claims_of(name, task, results, before)
            report(f"quality of {MODEL}", claims, given.json)


if __name__ == "__main__":
    main()
