"""Losses and choices against the plainest computation: one row at a time, all logits, float64."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from finetune.core.errors import DataError
from finetune.evaluation import likelihood
from finetune.evaluation.choice import choose
from finetune.evaluation.likelihood import LabelledRow, row_likelihoods
from finetune.evaluation.loss import heldout_loss


def _rows(count: int, vocabulary: int, seed: int = 0) -> list[LabelledRow]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = int(torch.randint(2, 24, (), generator=generator))
        ids = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        start = int(torch.randint(0, length, (), generator=generator))
        labels = [-100] * length if number == 3 else [-100] * start + ids[start:]
        rows.append(LabelledRow(ids, labels))
    return rows


def _naive(model: Any, row: LabelledRow) -> tuple[float, int]:
    logits = model(input_ids=torch.tensor([row.input_ids])).logits[0].double()
    scores = torch.log_softmax(logits, dim=-1)
    total, count = 0.0, 0
    for position, label in enumerate(row.labels):
        if position > 0 and label != -100:
            total += float(scores[position - 1, label])
            count += 1
    return total, count


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("model_name", ["tiny_llama", "tiny_gpt2"])
@torch.no_grad()
def test_row_likelihoods_equal_the_naive_ones_for_any_batch_size(
    model_name: str, batch_size: int, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(model_name)
    rows = _rows(17, model.config.vocab_size)
    found = row_likelihoods(model, rows, batch_size=batch_size)
    assert len(found) == len(rows)
    for row, result in zip(rows, found, strict=True):
        total, count = _naive(model, row)
        assert result.tokens == count
        # Float32 logits summed over at most 23 tokens.
        assert result.log_likelihood == pytest.approx(total, abs=2e-4)


@torch.no_grad()
def test_batches_are_split_where_their_logits_would_be_too_many(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _rows(17, tiny_llama.config.vocab_size)
    whole = row_likelihoods(tiny_llama, rows, batch_size=17)
    monkeypatch.setattr(likelihood, "_LOGITS_AT_A_TIME", 8 * tiny_llama.config.vocab_size)
    sizes: list[int] = []
    split = row_likelihoods(tiny_llama, rows, batch_size=17, progress=sizes.append)
    assert sum(sizes) == 17
    assert max(sizes) < 17
    for one, other in zip(whole, split, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=2e-4)


def test_only_positions_before_a_label_reach_the_head(tiny_llama: Any) -> None:
    seen: list[int] = []
    tiny_llama.get_output_embeddings().register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    ids = list(range(20))
    row_likelihoods(tiny_llama, [LabelledRow(ids, [-100] * 17 + ids[17:])] * 2, batch_size=2)
    assert seen == [3]


def test_mode_and_gradients_are_given_back(tiny_llama: Any) -> None:
    tiny_llama.train()
    row_likelihoods(tiny_llama, [LabelledRow([1, 2], [1, 2])], batch_size=1)
    assert tiny_llama.training
    assert torch.is_grad_enabled()


@torch.no_grad()
def test_a_prompt_tuned_model_is_scored_at_the_same_positions(tiny_llama: Any) -> None:
    """Virtual tokens go before the row, so positions that are counted from the start would be off by their number."""
    from peft import PromptTuningConfig, get_peft_model

    tuned = get_peft_model(tiny_llama, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()
    row = _rows(1, tiny_llama.config.vocab_size)[0]
    scores = torch.log_softmax(tuned(input_ids=torch.tensor([row.input_ids])).logits[0, 5:].double(), dim=-1)
    expected = sum(
        float(scores[position - 1, label])
        for position, label in enumerate(row.labels)
        if position > 0 and label != -100
    )
    assert row_likelihoods(tuned, [row], batch_size=1)[0].log_likelihood == pytest.approx(expected, abs=2e-4)


@torch.no_grad()
def test_heldout_loss_is_the_sum_over_tokens_and_ignores_unlabelled_rows(tiny_llama: Any) -> None:
    rows = _rows(9, tiny_llama.config.vocab_size)
    dataset = [{"input_ids": list(row.input_ids), "labels": list(row.labels)} for row in rows]
    naive = [_naive(tiny_llama, row) for row in rows]
    tokens = sum(count for _, count in naive)
    expected = -sum(total for total, _ in naive) / tokens
    found = heldout_loss(tiny_llama, dataset, 4)
    assert (found.tokens, found.rows) == (tokens, 9)
    assert found.loss == pytest.approx(expected, abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-5)


def test_heldout_loss_of_packed_rows_is_that_of_their_documents(tiny_llama: Any) -> None:
    rows = _rows(8, tiny_llama.config.vocab_size)
    dataset = [{"input_ids": row.input_ids, "labels": row.labels} for row in rows]
    packed = [
        {
            "input_ids": [token for row in part for token in row.input_ids],
            "labels": [label for row in part for label in row.labels],
            "documents": [len(row.input_ids) for row in part],
        }
        for part in (rows[:5], rows[5:])
    ]
    assert heldout_loss(tiny_llama, packed, 2).loss == pytest.approx(
        heldout_loss(tiny_llama, dataset, 2).loss, abs=1e-6
    )


def test_nothing_to_score_is_an_error_not_a_nan(tiny_llama: Any) -> None:
    with pytest.raises(DataError, match="carries loss"):
        heldout_loss(tiny_llama, [{"input_ids": [1, 2], "labels": [-100, -100]}], 1)
    with pytest.raises(DataError, match="without a token"):
        row_likelihoods(tiny_llama, [LabelledRow([], [])], batch_size=1)


@torch.no_grad()
def test_choose_takes_the_best_mean_per_token(tiny_llama: Any) -> None:
    vocabulary = tiny_llama.config.vocab_size
    questions = [_rows(3, vocabulary, seed=seed) for seed in range(6)]
    expected = []
    for question in questions:
        means = [total / max(1, count) for total, count in (_naive(tiny_llama, option) for option in question)]
        expected.append(means.index(max(means)))
    assert len(set(expected)) > 1
    for batch_size in (1, 5):
        assert choose(tiny_llama, questions, batch_size=batch_size) == expected


def test_a_model_that_cannot_drop_positions_is_scored_all_the_same(tiny_llama: Any) -> None:
    class Plain(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.config = inner, inner.config

        def forward(self, input_ids: Any, attention_mask: Any = None, use_cache: bool = False) -> Any:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    rows = _rows(5, tiny_llama.config.vocab_size)
    expected = row_likelihoods(tiny_llama, rows, batch_size=5)
    found = row_likelihoods(Plain(copy.deepcopy(tiny_llama)).eval(), rows, batch_size=5)
    for one, other in zip(expected, found, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-5)
