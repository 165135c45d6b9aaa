"""SST-2 by forward passes only: ``lozo`` and ``[lora, mezo]`` against zero-shot and LoRA with backpropagation.

The bundled model in bfloat16; a phrase is asked as ``PHRASE It was``, to be followed by `` great`` or `` terrible``;
the accuracy is that of the likelier of the two on the 872 sentences of GLUE's development set. Zeroth-order methods
learn to tell the two words apart (``objective: option_likelihood``), LoRA by backpropagation has the loss of the right
one. Every method has the same CPU seconds to train. A standard error is that of a share of 872 sentences. Learning
rates were found on ``dev.jsonl``.

Run: python benchmarks/zeroth_order_task.py [--quick] [--json PATH] [--methods lozo lora_mezo lora] [--seconds 600]
"""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from claims import Claim, argument_parser, report
from sst2 import DATA, WORDS, Phrases, read_phrases, score
from variants import MODEL

from finetune.core.errors import FinetuneWarning
from finetune.methods import build_method
from finetune.models import load_model, load_tokenizer
from finetune.models.batches import by_length, padded
from finetune.training.loss import LeanLoss

BATCH = 32
_LORA = {"name": "lora", "r": 8, "lora_alpha": 16, "target_modules": "all-linear", "lora_dropout": 0.0}
_ZEROTH = {"objective": "option_likelihood", "eps": 1e-2}


@dataclass(frozen=True)
class Setup:
    """A method section, and the learning rate of AdamW."""

    method: list[dict[str, Any]]
    learning_rate: float


SETUPS = {
    "lozo": Setup([{"name": "lozo", **_ZEROTH}], 3e-3),
    "lora_mezo": Setup([_LORA, {"name": "mezo", **_ZEROTH}], 1e-2),
    "lora": Setup([_LORA], 1e-3),
}


def batches(phrases: Phrases, words: list[int], *, options: bool) -> Iterator[dict[str, Any]]:
    """Yields batches of phrases with their answers, forever; only the answer carries loss.

    Args:
        phrases: What is asked.
        words: Their two answers.
        options: Whether the wrong answer comes too, as a row after the right one.
    """
    generator = random.Random(0)
    order = by_length([len(prompt) for prompt in phrases.prompts])  # else half of a batch would be padding
    groups = [order[start : start + BATCH] for start in range(0, len(order) - BATCH + 1, BATCH)]
    while True:
        generator.shuffle(groups)
        for rows in groups:
            answers = [(words[phrases.labels[row]], words[1 - phrases.labels[row]])[: 1 + options] for row in rows]
            texts = [[*phrases.prompts[row], word] for row, given in zip(rows, answers, strict=True) for word in given]
            ids, mask = padded(texts, 0, "right")
            labels = torch.full_like(ids, -100)
            for number, text in enumerate(texts):
                labels[number, len(text) - 1] = text[-1]
            batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
            yield {**batch, "options": [2] * len(rows)} if options else batch


def train(name: str, phrases: Phrases, words: list[int], seconds: float) -> tuple[Any, int]:
    """Returns the model trained for so many CPU seconds, the rate falling linearly with them, and the steps."""
    setup = SETUPS[name]
    torch.manual_seed(0)
    method = build_method(setup.method)
    model: Any = method.attach(load_model(MODEL, dtype="bfloat16", device="cpu", attn_implementation="sdpa"))
    LeanLoss(model)
    model.train()
    optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=setup.learning_rate, weight_decay=0.0)
    started, steps = time.process_time(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FinetuneWarning)  # AdamW's momentum, as documented
        for batch in batches(phrases, words, options=method.needs_options):
            spent = (time.process_time() - started) / seconds
            if spent >= 1:
                break
            optimizer.param_groups[0]["lr"] = setup.learning_rate * (1 - spent)
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return model, steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains each method, scores it, and reports."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--methods", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args(arguments)
    seconds, rows = (15.0, 100) if given.quick else (given.seconds, 872)
    tokenizer = load_tokenizer(MODEL)
    words = [tokenizer(word).input_ids[0] for word in WORDS]
    phrases = read_phrases(DATA / "train.jsonl", tokenizer, 5000)
    held_out = read_phrases(DATA / "test.jsonl", tokenizer, rows)
    zero_shot = score(load_model(MODEL, dtype="bfloat16", device="cpu"), held_out, words)["accuracy"]
    claims = []
    for name in given.methods:
        model, steps = train(name, phrases, words, seconds)
        accuracy = score(model, held_out, words)["accuracy"]
        error = math.sqrt(accuracy * (1 - accuracy) / rows)
        figure = name.replace("_", "/", 1) if name == "lora_mezo" else name
        claims.append(Claim(f"{figure}/accuracy", accuracy, "share", "", zero_shot))
        claims.append(Claim(f"{figure}/lift_in_standard_errors", (accuracy - zero_shot) / error, "ratio", ">= 2"))
        claims.append(Claim(f"{figure}/steps", steps, "steps"))
    report(f"SST-2, {seconds:g} CPU seconds of training each, {torch.get_num_threads()} threads", claims, given.json)


if __name__ == "__main__":
    main()
