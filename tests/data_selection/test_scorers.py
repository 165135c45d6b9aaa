"""The simple scorers: by chance, by length, by loss, IFD and its relatives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from finetune.core.errors import DataError, RegistryError
from finetune.data.render import render_prompt
from finetune.data_selection import Scorer, build_scorer
from finetune.data_selection.base import Measured, Unscored
from finetune.data_selection.engine.failures import UnscorableError
from finetune.data_selection.engine.rater import Rater
from finetune.data_selection.engine.targets import labelled_pair, measure_pairs, spoken_pair
from finetune.data_selection.pool import Example, pool_of
from finetune.data_selection.scorers.r_ifd import GUESS
from support.pools import PAIRS, examples
from support.tiny import tiny_gpt2, tiny_llama, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def rater(tokenizer: Any) -> Rater:
    return Rater(tiny_llama(), tokenizer)


def mean_loss(rater: Rater, before: list[int], target: list[int]) -> float:
    """The mean loss of ``target`` after ``before``, from all logits of one row."""
    with torch.no_grad():
        log_p = rater.model(input_ids=torch.tensor([[*before, *target]])).logits[0].log_softmax(-1)
    return -float(log_p[range(len(before) - 1, len(before) + len(target) - 1), target].mean())


def measure(scorer: Scorer, rater: Rater, pool: tuple[Example, ...]) -> list[Measured]:
    scorer.begin(rater, pool)
    return scorer.measure(rater, pool)


def scores(scorer: Scorer, rater: Rater, pool: tuple[Example, ...]) -> list[float]:
    measured = measure(scorer, rater, pool)
    return [score.value for score in scorer.score_pool(pool, [[row] for row in measured if isinstance(row, dict)])]


class TestWithoutModel:
    def test_chance_is_fixed_by_seed_and_content_whatever_the_order(self, tokenizer: Any) -> None:
        pool = examples(tokenizer)
        first, second = build_scorer({"name": "random"}), build_scorer({"name": "random", "seed": 1})
        values = {example.key: first.score(example).value for example in pool}
        assert values == {example.key: first.score(example).value for example in examples(tokenizer, PAIRS[::-1])}
        assert values != {example.key: second.score(example).value for example in pool}
        assert all(0 <= value < 1 for value in values.values())

    def test_a_repeated_row_has_a_key_and_a_chance_of_its_own(self, tokenizer: Any) -> None:
        twice = examples(tokenizer, [PAIRS[0], PAIRS[0]])
        assert twice[1].key == f"{twice[0].key}-2"
        scorer = build_scorer({"name": "random"})
        assert scorer.score(twice[0]) != scorer.score(twice[1])

    def test_chance_is_uniform(self, tokenizer: Any) -> None:
        pool = examples(tokenizer, [("Count.", str(number)) for number in range(2000)])
        values = sorted(build_scorer({"name": "random"}).score(example).value for example in pool)
        # Kolmogorov-Smirnov: 1.63 / sqrt(2000) is passed by one uniform sample in a hundred
        assert max(abs(value - place / 2000) for place, value in enumerate(values)) < 1.63 / math.sqrt(2000)

    def test_length_counts_the_tokens_that_carry_loss(self, tokenizer: Any) -> None:
        example = examples(tokenizer, [("Name a dog.", "the lazy dog")])[0]
        answer = tokenizer("the lazy dog<|im_end|>", add_special_tokens=False)["input_ids"]
        assert build_scorer({"name": "length"}).score(example).value == len(answer)


class TestLoss:
    def test_is_the_mean_over_the_row_and_not_over_the_batch(self, rater: Rater) -> None:
        pool = examples(rater.tokenizer)
        for example, value in zip(pool, scores(build_scorer({"name": "loss"}), rater, pool), strict=True):
            ids, labels = example.encoded.input_ids, example.encoded.labels
            first = next(place for place, label in enumerate(labels) if label != -100)
            count = sum(label != -100 for label in labels)
            assert value == pytest.approx(mean_loss(rater, ids[:first], ids[first : first + count]), abs=1e-5)

    def test_perplexity_is_its_exponential(self, rater: Rater) -> None:
        pool = examples(rater.tokenizer)
        losses, perplexities = (scores(build_scorer({"name": name}), rater, pool) for name in ("loss", "perplexity"))
        assert perplexities == pytest.approx([math.exp(loss) for loss in losses])


class TestIfd:
    def test_numbers_by_hand(self, tokenizer: Any) -> None:
        example = examples(tokenizer)[0]
        evidence = {"loss": 1.6, "loss_alone": 2.1, "scored_tokens": 7}
        assert build_scorer({"name": "ifd"}).score(example, evidence).value == pytest.approx(0.606531, abs=1e-6)
        by_loss = build_scorer({"name": "ifd", "metric": "loss"})
        assert by_loss.score(example, evidence).value == pytest.approx(0.761905, abs=1e-6)

    def test_is_the_ratio_of_two_plain_perplexities(self, rater: Rater) -> None:
        tokenizer = rater.tokenizer
        pool = examples(tokenizer)
        for (_, answer), example, value in zip(
            PAIRS, pool, scores(build_scorer({"name": "ifd"}), rater, pool), strict=True
        ):
            prompt = render_prompt(example.conversation.messages[:-1], tokenizer)
            target = tokenizer(answer, add_special_tokens=False)["input_ids"]
            alone = mean_loss(rater, [tokenizer.bos_token_id], target)
            assert value == pytest.approx(math.exp(mean_loss(rater, prompt, target) - alone), rel=1e-4)

    def test_every_answer_of_a_conversation_counts_by_its_tokens(self, rater: Rater) -> None:
        tokenizer = rater.tokenizer
        turns = ("Name a dog.", "the lazy dog", "When?", "every day at noon and never else")
        (example,) = examples(tokenizer, [turns])
        given = alone = tokens = 0.0
        for last in (1, 3):
            prompt = render_prompt(example.conversation.messages[:last], tokenizer)
            target = tokenizer(turns[last], add_special_tokens=False)["input_ids"]
            given += len(target) * mean_loss(rater, prompt, target)
            alone += len(target) * mean_loss(rater, [tokenizer.bos_token_id], target)
            tokens += len(target)
        (measured,) = measure(build_scorer({"name": "ifd"}), rater, (example,))
        expected = {"loss": given / tokens, "loss_alone": alone / tokens, "scored_tokens": tokens}
        assert measured == pytest.approx(expected, rel=1e-5)

    def test_a_row_at_one_or_above_is_not_kept_unless_asked(self, tokenizer: Any) -> None:
        example = examples(tokenizer)[0]
        evidence = {"loss": 2.0, "loss_alone": 2.0, "scored_tokens": 7}
        assert build_scorer({"name": "ifd"}).score(example, evidence).excluded
        assert not build_scorer({"name": "ifd", "misaligned": "keep"}).score(example, evidence).excluded

    def test_plain_text_is_refused_by_name(self, tokenizer: Any) -> None:
        from finetune.data.records import Conversation

        pool = pool_of([Conversation((), "0", "wiki.jsonl", 4, text="Paris is a city.")], tokenizer).examples
        with pytest.raises(DataError) as caught:
            build_scorer({"name": "ifd"}).check(pool, tokenizer)
        assert caught.value.where == "wiki.jsonl:4"
        build_scorer({"name": "loss"}).check(pool, tokenizer)


def table_model(next_of: torch.Tensor) -> torch.nn.Module:
    """A model whose next token depends on the last one alone, with the probabilities of a table (V, V)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = len(next_of)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        rms_norm_eps=1e-12,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in (model.model.layers[0].self_attn.o_proj.weight, model.model.layers[0].mlp.down_proj.weight):
            parameter.zero_()  # nothing is added to the embedding
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(next_of.log().T / size**0.5)  # the norm makes a one the root of the size
    return model


class TestAgainstATable:
    """Token 0 starts; P(1 | 0) = 0.25, P(1 | 1) = 0.5, P(1 | 2) = 0.8, and token 2 has the rest; 3 makes them even."""

    @pytest.fixture
    def rater(self, tokenizer: Any) -> Rater:
        table = torch.tensor([[1e-9, p, 1 - p, 1e-9] for p in (0.25, 0.5, 0.8, 0.5)])
        return Rater(table_model(table), tokenizer)  # type: ignore[arg-type]

    def test_both_losses_by_hand(self, rater: Rater, tokenizer: Any) -> None:
        (measured,) = measure_pairs(rater, [spoken_pair([0, 2], [1, 1, 2], [0], limit=None)])
        given, alone = -math.log(0.8 * 0.5 * 0.5) / 3, -math.log(0.25 * 0.5 * 0.5) / 3
        assert measured == pytest.approx({"loss": given, "loss_alone": alone, "scored_tokens": 3}, abs=1e-5)
        found = build_scorer({"name": "ifd"}).score(examples(tokenizer)[0], measured)  # type: ignore[arg-type]
        assert found.value == pytest.approx((0.25 / 0.8) ** (1 / 3), abs=1e-5)

    def test_without_a_start_the_first_token_counts_on_neither_side(self, rater: Rater) -> None:
        (measured,) = measure_pairs(rater, [spoken_pair([2], [1, 1, 2], [], limit=None)])
        loss = -math.log(0.5 * 0.5) / 2
        assert measured == pytest.approx({"loss": loss, "loss_alone": loss, "scored_tokens": 2}, abs=1e-5)

    def test_a_long_answer_in_the_batch_does_not_weigh_on_a_short_one(self, rater: Rater) -> None:
        short, long = spoken_pair([0, 2], [1], [0], limit=None), spoken_pair([0, 2], [1] * 40, [0], limit=None)
        one, other = measure_pairs(rater, [short, long])
        assert one == pytest.approx(measure_pairs(rater, [short])[0], abs=1e-6)
        assert one["loss"] == pytest.approx(-math.log(0.8), abs=1e-5)  # type: ignore[index]
        assert other["loss"] == pytest.approx(-(math.log(0.8) + 39 * math.log(0.5)) / 40, abs=1e-5)  # type: ignore[index]


class TestTargets:
    def test_a_cut_answer_is_the_same_on_both_sides(self) -> None:
        pair = spoken_pair([1, 10, 11], [20, 21, 22, 23], [1], limit=5)
        assert list(pair.given[0].input_ids) == [1, 10, 11, 20, 21]
        assert [row.labels[-2:] for row in (*pair.given, *pair.alone)] == [[20, 21], [20, 21]]

    def test_nothing_left_has_a_reason_and_no_number(self) -> None:
        with pytest.raises(UnscorableError, match="longer than the model's context"):
            spoken_pair([1, 10, 11], [20], [1], limit=3)
        with pytest.raises(UnscorableError, match="empty"):
            spoken_pair([1, 10, 11], [], [1], limit=None)

    def test_without_a_start_the_first_token_is_left_out_on_both_sides(self) -> None:
        spoken = spoken_pair([10, 11], [20, 21, 22], [], limit=None)
        assert list(spoken.given[0].labels) == [-100, -100, -100, 21, 22]
        labels = [-100, 20, 21, 2, -100, 30, 31, 2]
        labelled = labelled_pair([10, 20, 21, 2, 12, 30, 31, 2], labels, [], ends={2})
        assert list(labelled.given[0].labels) == [-100, -100, 21, -100, -100, -100, 31, -100]
        assert [list(row.labels) for row in labelled.alone] == [[20, 21], [30, 31]]  # a row's first token never counts

    def test_with_a_start_all_tokens_count_and_the_end_of_turn_does_not(self) -> None:
        labels = [-100, 20, 21, 2, -100, 30, 2]
        pair = labelled_pair([10, 20, 21, 2, 12, 30, 2], labels, [1], ends={2})
        assert list(pair.given[0].labels) == [-100, 20, 21, -100, -100, 30, -100]
        assert [list(row.input_ids) for row in pair.alone] == [[1, 20, 21], [1, 30]]


class TestReversedIfd:
    def test_is_the_ratio_of_two_plain_perplexities(self, rater: Rater) -> None:
        from finetune.data.records import Message

        tokenizer = rater.tokenizer
        pool = examples(tokenizer)
        for (question, answer), value in zip(PAIRS, scores(build_scorer({"name": "r_ifd"}), rater, pool), strict=True):
            asked = render_prompt([Message("user", GUESS.format(answer=answer))], tokenizer)
            target = tokenizer(question, add_special_tokens=False)["input_ids"]
            alone = mean_loss(rater, [tokenizer.bos_token_id], target)
            assert value == pytest.approx(math.exp(mean_loss(rater, asked, target) - alone), rel=1e-4)

    def test_an_answer_to_nothing_has_a_reason(self, rater: Rater) -> None:
        from finetune.data_selection.engine.failures import Isolated

        scorer = build_scorer({"name": "r_ifd"})
        pool = examples(rater.tokenizer, [PAIRS[0], ("", "the lazy dog")])
        measured = Isolated(lambda batch: scorer.measure(rater, batch))(pool)
        assert measured[1] == Unscored("there is no instruction to guess")
        assert isinstance(measured[0], dict)


class TestSuperfiltering:
    def test_the_bare_prompt_of_a_small_model_with_another_tokenizer(self, tokenizer: Any) -> None:
        small = Rater(tiny_gpt2(), tokenizer)
        pool = examples(tokenizer)
        scorer = build_scorer({"name": "superfiltering", "model": "small"})
        assert scorer.models("the recipe's") == ["small"]
        for (question, answer), value in zip(PAIRS, scores(scorer, small, pool), strict=True):
            start = [tokenizer.bos_token_id]
            prompt = [*start, *tokenizer(question + "\n", add_special_tokens=False)["input_ids"]]
            target = tokenizer(answer, add_special_tokens=False)["input_ids"]
            ratio = math.exp(mean_loss(small, prompt, target) - mean_loss(small, start, target))
            assert value == pytest.approx(ratio, rel=1e-4)


def test_an_unknown_scorer_is_answered_with_the_nearest() -> None:
    with pytest.raises(RegistryError) as caught:
        build_scorer({"name": "idf"})
    assert caught.value.near == "ifd"
