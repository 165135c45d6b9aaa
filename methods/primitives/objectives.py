"""What a zeroth-order method may minimise besides the model's own loss: ``objective(model, batch)`` is one number."""

# Legend: R rows, Q questions, T tokens of a row

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from finetune.core.errors import TrainingError
from finetune.methods.primitives.labelled_tokens import IGNORED, score_labelled_tokens
from finetune.methods.primitives.projected_gradient import OPTIONS

__all__ = ["accuracy", "exact_match", "f1", "option_likelihood"]


def option_likelihood(model: Any, batch: dict[str, Any]) -> Tensor:
    """Returns the cross entropy of the right options, where an option's logit is its tokens' mean log-likelihood.

    As MeZO trains classification (Malladi et al., arXiv 2305.17333, appendix on objectives): what is learned is to
    tell the options apart, not to name them.
    """
    losses = [-scores.log_softmax(0)[0] for scores in _scores(model, batch)]
    return torch.stack(losses).mean()


def accuracy(model: Any, batch: dict[str, Any]) -> float:
    """Returns minus the share of the questions whose right option is likelier per token than every other."""
    right = [bool((scores[0] > scores[1:]).all()) for scores in _scores(model, batch)]
    return -sum(right) / len(right)


def exact_match(model: Any, batch: dict[str, Any]) -> Tensor:
    """Returns minus the share of the rows that greedy decoding would answer with just the labelled tokens."""
    return -score_labelled_tokens(model, batch).exact.float().mean()


def f1(model: Any, batch: dict[str, Any]) -> float:
    """Returns minus the mean F1 of the tokens of greedy answers: SQuAD's measure, over tokens in place of words."""
    labels: Tensor = batch["labels"]
    answers = [row[row != IGNORED].tolist() for row in labels]
    stops = _stops(model)
    found = _greedy(model, batch, longest=max(map(len, answers)), pad=next(iter(stops), 0))
    scores = [
        _overlap(_until(given, stops), _until(answer, stops)) for given, answer in zip(found, answers, strict=True)
    ]
    return -sum(scores) / len(scores)


def _scores(model: Any, batch: dict[str, Any]) -> Sequence[Tensor]:
    """Returns the mean log-likelihood of each option, per question."""
    counts = batch.get(OPTIONS)
    if counts is None:
        raise TrainingError(
            "the objective compares options, and the batch has none",
            where="method.objective",
            want=f"{OPTIONS}: how many rows each question has, its right option first",
            fix="rows with a column `choices`, or data.template, in a recipe",
        )
    rows = {key: value for key, value in batch.items() if key != OPTIONS}
    return torch.split(score_labelled_tokens(model, rows).log_likelihood, list(counts))


def _stops(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set() if ends is None else set(ends) if isinstance(ends, list) else {ends}


def _greedy(model: Any, batch: dict[str, Any], *, longest: int, pad: int) -> list[list[int]]:
    """Returns what greedy decoding says after each row's prompt: its tokens before the first label."""
    ids, labelled = batch["input_ids"], batch["labels"] != IGNORED
    lengths = labelled.long().argmax(1)
    width = int(lengths.max())
    prompts = ids.new_full((len(ids), width), pad)
    mask = torch.zeros_like(prompts)
    for row, length in enumerate(lengths.tolist()):
        prompts[row, width - length :] = ids[row, :length]
        mask[row, width - length :] = 1
    said = model.generate(
        input_ids=prompts,
        attention_mask=mask,
        max_new_tokens=longest,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=pad,
    )
    tokens: list[list[int]] = said[:, width:].tolist()
    return tokens


def _until(tokens: list[int], stops: set[int]) -> list[int]:
    return next((tokens[:place] for place, token in enumerate(tokens) if token in stops), tokens)


def _overlap(given: list[int], answer: list[int]) -> float:
    if not given or not answer:
        return float(given == answer)
    common = (Counter(given) & Counter(answer)).total()
    return 2 * common / (len(given) + len(answer))
