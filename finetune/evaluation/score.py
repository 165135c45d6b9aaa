"""Scores one task: exact match, multiple choice, or held-out loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.core.errors import DataError
from finetune.core.routing import routed
from finetune.data.records import Conversation, Message
from finetune.data.render import render, render_prompt
from finetune.evaluation.choice import choose
from finetune.evaluation.interval import ratio_interval, wilson_interval
from finetune.evaluation.likelihood import LabelledRow, RowLikelihood, row_likelihoods
from finetune.evaluation.lm_eval import run_lm_eval
from finetune.evaluation.loss import mean_loss
from finetune.evaluation.results import Prediction, TaskResult, evenly_spaced
from finetune.evaluation.tasks import Task, load_rows
from finetune.models.generate import generate

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

__all__ = ["Scoring", "score_task"]


@dataclass(frozen=True)
class Scoring:
    """How tasks are scored.

    Attributes:
        limit: Rows of a task that are scored, evenly spaced; None for all.
        batch_size: Rows of one forward pass.
        max_new_tokens: Limit of a generation where the task has none of its own.
        samples: Predictions that a result shows.
    """

    limit: int | None = None
    batch_size: int = 16
    max_new_tokens: int = 64
    samples: int = 4


ProgressOf = Callable[[str, int], Callable[[int], object]]
"""From a task's name and its number of rows to what is called with the number of rows that were just finished."""


def score_task(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, task: Task, scoring: Scoring, progress_of: ProgressOf
) -> list[TaskResult]:
    """Returns the metrics of ``task``: one, or loss and perplexity.

    Raises:
        DataError: A row is unusable.
    """
    with routed(model, task.trained_as):
        return _score(model, tokenizer, task, scoring, progress_of)


def _score(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, task: Task, scoring: Scoring, progress_of: ProgressOf
) -> list[TaskResult]:
    if task.kind == "lm_eval":
        return run_lm_eval(model, tokenizer, task.name, limit=scoring.limit, batch_size=scoring.batch_size)
    rows = load_rows(task, scoring.limit)
    if task.kind == "loss":
        return _score_loss(model, tokenizer, task, rows, scoring, progress_of)
    if task.kind == "choice":
        outputs, metric = _choose(model, tokenizer, task, rows, scoring, progress_of), "accuracy"
    else:
        outputs, metric = _generate(model, tokenizer, task, rows, scoring, progress_of), "exact_match"
    predictions = [_prediction(row, output) for row, output in zip(rows, outputs, strict=True)]
    return [_share(task.name, metric, predictions, scoring.samples)]


def _generate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    rows: Sequence[Conversation],
    scoring: Scoring,
    progress_of: ProgressOf,
) -> list[str]:
    texts = generate(
        model,
        tokenizer,
        [render_prompt(row.messages[:-1], tokenizer) for row in rows],
        max_new_tokens=task.max_new_tokens or scoring.max_new_tokens,
        batch_size=scoring.batch_size,
        progress=progress_of(task.name, len(rows)),
    )
    return [text.strip() for text in texts]


def _choose(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    rows: Sequence[Conversation],
    scoring: Scoring,
    progress_of: ProgressOf,
) -> list[str]:
    questions = [[_answered(row, str(choice), tokenizer) for choice in row.extra["choices"]] for row in rows]
    progress = progress_of(task.name, sum(len(question) for question in questions))
    chosen = choose(model, questions, batch_size=scoring.batch_size, progress=progress)
    return [str(row.extra["choices"][position]) for row, position in zip(rows, chosen, strict=True)]


def _answered(row: Conversation, answer: str, tokenizer: PreTrainedTokenizerBase) -> LabelledRow:
    messages = (*row.messages[:-1], Message("assistant", answer))
    turn = Conversation(messages, id=row.id, source=row.source, line=row.line, extra={})
    encoded = render(turn, tokenizer, loss_on="last")
    return LabelledRow(encoded.input_ids, encoded.labels)


def _score_loss(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    rows: Sequence[Conversation],
    scoring: Scoring,
    progress_of: ProgressOf,
) -> list[TaskResult]:
    encoded = [render(row, tokenizer, loss_on="assistant") for row in rows]
    found = row_likelihoods(
        model,
        [LabelledRow(row.input_ids, row.labels) for row in encoded],
        batch_size=scoring.batch_size,
        progress=progress_of(task.name, len(rows)),
    )
    by_group: dict[str, list[RowLikelihood]] = {}
    for row, likelihood in zip(rows, found, strict=True):
        if group := _group(row):
            by_group.setdefault(group, []).append(likelihood)
    losses = {name: mean_loss(members) for name, members in sorted(by_group.items())}
    total = mean_loss(found)
    low, high = ratio_interval([-row.log_likelihood for row in found], [row.tokens for row in found])
    return [
        TaskResult(
            task.name, "loss", total.loss, len(rows), low, high, {k: (v.loss, v.rows) for k, v in losses.items()}
        ),
        TaskResult(
            task.name,
            "perplexity",
            total.perplexity,
            len(rows),
            _exp(low),
            _exp(high),
            {name: (group.perplexity, group.rows) for name, group in losses.items()},
        ),
    ]


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _prediction(row: Conversation, output: str) -> Prediction:
    expected = row.messages[-1].content.strip()
    prompt = row.messages[-2].content if len(row.messages) > 1 else ""
    return Prediction(row.id, prompt, expected, output, output.strip() == expected, _group(row))


def _group(row: Conversation) -> str:
    return str(row.extra.get("group") or "")


def _share(task: str, metric: str, predictions: Sequence[Prediction], samples: int) -> TaskResult:
    if not predictions:
        raise DataError("the task has no rows", where=task)
    right = sum(prediction.correct for prediction in predictions)
    low, high = wilson_interval(right, len(predictions))
    by_group: dict[str, list[bool]] = {}
    for prediction in predictions:
        if prediction.group:
            by_group.setdefault(prediction.group, []).append(prediction.correct)
    return TaskResult(
        task,
        metric,
        right / len(predictions),
        len(predictions),
        low,
        high,
        {name: (sum(members) / len(members), len(members)) for name, members in sorted(by_group.items())},
        tuple(predictions[position] for position in evenly_spaced(len(predictions), samples)),
        tuple(predictions),
    )
