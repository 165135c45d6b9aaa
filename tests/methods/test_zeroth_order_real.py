"""What forward passes teach a real model in the steps that the specification gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import finetune
from finetune.models import load_model, load_tokenizer

pytestmark = pytest.mark.real

MODEL = "bundled:smollm2-135m-instruct"
SENTENCES = (
    "The night train to Lisbon leaves from platform four at nine.",
    "A baker who rises before the sun sells his bread while it is warm.",
    "Our telescope found a comet that nobody had written down before.",
    "She tuned the old piano by ear, one string after the other.",
)


def test_the_loss_of_four_sentences_falls() -> None:
    tokenizer: Any = load_tokenizer(MODEL)
    batch = tokenizer(list(SENTENCES), return_tensors="pt", padding=True)
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    method = finetune.method("lozo", eps=1e-2, lazy_interval=50)
    model: Any = method.attach(load_model(MODEL, dtype="bfloat16", device="cpu"))
    optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=2e-4)
    losses = []
    for _ in range(76):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # Section 11, invariant 17: at least 0.3 within 76 steps; single losses vary by some hundredths.
    assert sum(losses[-4:]) / 4 < sum(losses[:2]) / 2 - 0.3
