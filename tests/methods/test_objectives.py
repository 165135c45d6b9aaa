"""What zeroth-order methods minimise besides the loss, against plain loops over single rows."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import finetune
from finetune.core.errors import ConfigError, FinetuneWarning, TrainingError
from finetune.methods.primitives.objectives import accuracy, exact_match, f1, option_likelihood
from support.tiny import tiny_gpt2, tiny_llama, token_batch

# Two questions: options of one token each, and options of different lengths; the first of each is right.
PROMPTS = ([5, 6, 7], [8, 9])
OPTIONS = ([[11], [12], [13]], [[21, 22], [23]])
ROWS = [(prompt, option) for prompt, options in zip(PROMPTS, OPTIONS, strict=True) for option in options]


def batch() -> dict[str, Any]:
    longest = max(len(prompt) + len(option) for prompt, option in ROWS)
    ids, labels, mask = (torch.full((len(ROWS), longest), fill) for fill in (0, -100, 0))
    for row, (prompt, option) in enumerate(ROWS):
        end = len(prompt) + len(option)
        ids[row, :end] = torch.tensor([*prompt, *option])
        labels[row, len(prompt) : end] = torch.tensor(option)
        mask[row, :end] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@torch.no_grad()
def log_probabilities(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Returns the log-probability of each answer token, one row at a time."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double()
    places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    return torch.stack([logits[p].log_softmax(0)[token] for p, token in zip(places, answer, strict=True)])


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Returns the likeliest continuation, without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_option_likelihood_and_accuracy_compare_mean_log_probabilities(build: Any) -> None:
    model = build().eval()
    means = [float(log_probabilities(model, *row).mean()) for row in ROWS]
    first, second = torch.tensor(means[:3]), torch.tensor(means[3:])
    expected = (first.logsumexp(0) - first[0] + second.logsumexp(0) - second[0]) / 2
    asked = {**batch(), "options": [3, 2]}
    with torch.no_grad():
        assert float(option_likelihood(model, asked)) == pytest.approx(float(expected), rel=1e-5)
        right = [first.argmax() == 0, second.argmax() == 0]
        assert accuracy(model, asked) == -sum(map(int, right)) / 2


def test_options_that_are_equally_likely_are_not_right() -> None:
    rows = batch()
    same = {key: tensor[:1].repeat(2, 1) for key, tensor in rows.items()}
    with torch.no_grad():
        assert accuracy(tiny_llama().eval(), {**same, "options": [2]}) == 0


def test_options_of_one_token_share_a_pass() -> None:
    model: Any = tiny_llama().eval()
    seen = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    with torch.no_grad():
        option_likelihood(model, {**batch(), "options": [3, 2]})
    # The three options of the first question are one row, those of the second two.
    assert seen == [3]


def test_exact_match_and_f1_are_those_of_greedy_answers() -> None:
    model: Any = tiny_llama().eval()
    model.generation_config.eos_token_id = None
    said = greedy(model, PROMPTS[0], 3)
    answers = [said, [said[0], (said[1] + 1) % 300, said[2]]]
    rows = [[*PROMPTS[0], *answer] for answer in answers]
    labels = [[-100] * 3 + answer for answer in answers]
    asked = {"input_ids": torch.tensor(rows), "labels": torch.tensor(labels)}
    common = (Counter(said) & Counter(answers[1])).total()
    with torch.no_grad():
        assert float(exact_match(model, asked)) == -0.5
        assert f1(model, asked) == pytest.approx(-(1 + common / 3) / 2)
        # What follows the end of an answer does not count.
        model.generation_config.eos_token_id = said[1]
        asked["labels"] = torch.tensor([[-100] * 3 + said])
        asked["input_ids"] = torch.tensor([rows[0]])
        assert f1(model, asked) == -1.0


def first_logit(model: Any, batch: dict[str, Any]) -> float:
    """An objective of a user's: a logit of the first row."""
    return float(model(input_ids=batch["input_ids"][:1]).logits[0, -1, 3])


def a_word(model: Any, batch: dict[str, Any]) -> Any:
    return batch.get("answer", "good")


def drawn(model: Any, batch: dict[str, Any]) -> Tensor:
    return torch.rand(())


@pytest.mark.parametrize("name", ["mezo", "lozo"])
@pytest.mark.parametrize("objective", [first_logit, f"{__name__}:first_logit"])
def test_a_users_function_is_measured_along_the_directions(name: str, objective: Any) -> None:
    method = finetune.method(name, objective=objective, eps=1e-3)
    assert method.config.objective == f"{__name__}:first_logit"
    model = method.attach(tiny_llama(dtype=torch.float64))
    ids = token_batch(2, 8)
    with torch.no_grad():
        values = []
        for scale in (1e-3, -1e-3):
            with method._directions.perturbed(0, scale):
                values.append(first_logit(model, {"input_ids": ids}))
    model.train()
    loss = model(input_ids=ids)["loss"]
    loss.backward()
    assert loss.item() == pytest.approx(sum(values) / 2, rel=1e-6)
    assert float(model.projected_gradient.grad) == pytest.approx((values[0] - values[1]) / 2e-3, rel=1e-5)
    assert model.training


def test_both_sides_draw_the_same_and_nobody_elses_draws_change() -> None:
    model: Any = finetune.method("lozo", objective=drawn).attach(tiny_llama())
    before = torch.get_rng_state()
    model(input_ids=token_batch(2, 8))["loss"].backward()
    assert float(model.projected_gradient.grad) == 0.0
    assert torch.equal(torch.get_rng_state(), before)


def test_ties_are_counted_and_said_once() -> None:
    method = finetune.method("lozo", objective=drawn)
    model: Any = method.attach(tiny_llama())
    optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FinetuneWarning)
        for _ in range(22):
            model(input_ids=token_batch(1, 4))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [str(one.message)[:32] for one in caught] == ["at 20 of the first 20 steps the "]


def test_batches_of_a_step_count_by_their_labelled_tokens() -> None:
    model: Any = finetune.method("lozo", objective="option_likelihood").attach(tiny_llama())
    asked = {**batch(), "options": [3, 2]}
    whole = model(**asked)["loss"].item()
    labelled = int((asked["labels"] != -100).sum())
    assert model(**asked, num_items_in_batch=torch.tensor(2 * labelled))["loss"].item() == pytest.approx(whole / 2)


@torch.no_grad()
def test_held_out_questions_are_measured_by_the_objective() -> None:
    model: Any = finetune.method("lozo", objective="accuracy").attach(tiny_llama())
    asked = {**batch(), "options": [3, 2]}
    assert float(model(**asked)["loss"]) == accuracy(model, asked)
    assert model(**batch()).logits.shape[:2] == batch()["labels"].shape


@pytest.mark.parametrize("answer", [None, "good", [0.5], torch.zeros(2)])
def test_an_objective_that_returns_no_number(answer: Any) -> None:
    model: Any = finetune.method("lozo", objective=a_word).attach(tiny_llama())
    with pytest.raises(TrainingError, match="returned no number") as caught:
        model(input_ids=token_batch(2, 8), answer=answer)
    problem = caught.value.problems[0]
    assert problem.where == "method.objective a_word"
    assert problem.got == ("a tensor of shape (2,)" if isinstance(answer, Tensor) else type(answer).__name__)


def test_a_batch_without_options() -> None:
    model: Any = finetune.method("lozo", objective="accuracy").attach(tiny_llama())
    with pytest.raises(TrainingError, match="compares options, and the batch has none"):
        model(**batch())


def test_objectives_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="imported by its name"):
        finetune.method("lozo", objective=lambda model, batch: 0.0)
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        finetune.method("lozo", objective="acuracy")
    with pytest.raises(ConfigError, match="No module named 'nowhere'"):
        finetune.method("lozo", objective="nowhere:f").attach(tiny_llama())
    with pytest.raises(ConfigError, match="no function"):
        finetune.method("lozo", objective="math:pi").attach(tiny_llama())


@pytest.mark.parametrize("objective", ["option_likelihood", "accuracy"])
def test_training_by_an_objective_improves_it(objective: str) -> None:
    method = finetune.method("lozo", objective=objective, eps=3e-2, queries=4)
    model: Any = method.attach(tiny_llama())
    asked = {**batch(), "options": [3, 2]}
    optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=5e-3, betas=(0.0, 0.99), weight_decay=0.0)
    with torch.no_grad():
        before = float(model(**asked)["loss"])
    for _ in range(60):
        model(**asked)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        after = float(model(**asked)["loss"])
    assert math.isfinite(after)
    assert after < before or after == before == -1.0
