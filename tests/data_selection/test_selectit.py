"""SelectIT: numbers worked by hand, the ratings' tokens, shared prefixes, and the published loop in float32."""

from __future__ import annotations

import functools
import math
import random
import statistics
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from finetune.core.errors import ConfigError, FinetuneWarning
from finetune.data_selection import build_scorer
from finetune.data_selection.engine import prefixes
from finetune.data_selection.engine.failures import UnscorableError
from finetune.data_selection.engine.prefixes import can_share, last_hidden
from finetune.data_selection.engine.rater import Rater
from finetune.data_selection.pool import Example, Exchange
from finetune.data_selection.rating.prompts import RATING_PROMPTS, RatingForm, prompt_hash, read_prompts
from finetune.data_selection.rating.tokens import resolve_rating_tokens
from finetune.data_selection.rating.uncertainty import model_level, rating_shares, sentence_level, token_level
from support.pools import PAIRS, examples
from support.tiny import tiny_gemma2, tiny_gpt2, tiny_llama, tiny_tokenizer

A = ([0.05, 0.05, 0.10, 0.20, 0.40], [0.02, 0.03, 0.05, 0.60, 0.30], [0.10, 0.10, 0.20, 0.30, 0.10])
"""Raw probabilities of the ratings after three prompts."""


def shares(probabilities: list[float]) -> list[float]:
    return rating_shares([math.log(p) if p else -math.inf for p in probabilities])


class TestArithmetic:
    def test_the_three_levels_by_hand(self) -> None:
        by_prompt = [token_level(shares(p)) for p in A]
        assert by_prompt == pytest.approx([1.875, 2.0, 0.875])
        assert sentence_level(by_prompt) == pytest.approx(1.438489, abs=1e-6)
        official = [token_level(shares(p), "official") for p in A]
        assert official == pytest.approx([0.413390, 0.452141, 0.185143], abs=1e-6)
        assert sentence_level(official) == pytest.approx(0.342164, abs=1e-6)
        weights = [size / 90 for size in (7, 13, 70)]
        assert model_level([1.2, 0.9, 1.5], weights) == pytest.approx(1.39)
        assert model_level([1.5, 1.5, 1.2], weights) == pytest.approx(1.266667, abs=1e-6)
        assert model_level([1.2, 0.9, 1.5], [7 / 20, 13 / 20, 70 / 90]) == pytest.approx(2.171667, abs=1e-6)
        assert model_level([1.5, 1.5, 1.2], [7 / 20, 13 / 20, 70 / 90]) == pytest.approx(2.433333, abs=1e-6)

    def test_the_second_softmax_of_the_code_turns_a_ranking_round(self) -> None:
        first, second = [0.1, 0.1, 0.1, 0.1, 0.6], [0.0775, 0.0775, 0.0775, 0.69, 0.0775]
        assert [token_level(p) for p in (first, second)] == pytest.approx([2.5, 2.45])
        assert [token_level(p, "official") for p in (first, second)] == pytest.approx([0.574220, 0.578294], abs=1e-6)

    def test_the_second_softmax_sees_the_tail(self) -> None:
        for p, official in (([0.4, 0.3, 0.3, 0, 0], 0.051182), ([0.4, 0.15, 0.15, 0.15, 0.15], 0.053752)):
            assert token_level(p) == pytest.approx(0.25)  # the first rating is the likeliest, so this is U
            assert token_level(p, "official") == pytest.approx(official, abs=1e-6)

    def test_the_number_of_prompts_is_not_the_scale(self) -> None:
        """The published code has one k for both: with three prompts it reads three ratings, and divides by two."""

        def published(p: list[float], k: int) -> float:
            q = torch.softmax(torch.tensor(p, dtype=torch.float64), -1)
            best = int(q.argmax())
            return (best + 1) * sum(abs(float(q[i] - q[best])) for i in range(k)) / (k - 1)

        p = [0.1, 0.1, 0.1, 0.1, 0.6]
        assert published(p, 3) == pytest.approx(0.861329, abs=1e-6)
        assert token_level(p, "official") == pytest.approx(published(p, 5)) == pytest.approx(0.574220, abs=1e-6)

    def test_bounds(self) -> None:
        assert token_level([0.2] * 5) == pytest.approx(0)
        assert token_level([0, 0, 0, 0, 1]) == pytest.approx(5)
        assert token_level([0, 0, 0, 0, 1], "official") == pytest.approx(1.278810, abs=1e-6)

    def test_confidence_is_the_mean_distance_from_the_largest_share(self) -> None:
        generator = random.Random(0)
        for _ in range(1000):
            weights = [generator.expovariate(1) for _ in range(5)]
            p = [weight / sum(weights) for weight in weights]
            best = max(range(5), key=p.__getitem__)
            disparity = sum(abs(share - p[best]) for share in p) / 4
            assert token_level(p) == pytest.approx((best + 1) * disparity)
            assert rating_shares([math.log(3 * share) for share in p]) == pytest.approx(p)


resolve = functools.partial(resolve_rating_tokens, special=True, key="select.scorer.cue")


class TestRatingTokens:
    def test_each_rating_is_the_token_that_it_adds(self) -> None:
        tokenizer = tiny_tokenizer()
        found = resolve(tokenizer, ["a: \n", "b\n"], 5, variants="strict")
        assert [tokenizer.decode(ids) for ids in found.ids] == ["1", "2", "3", "4", "5"]
        assert not found.without_space

    def merging(self, *merges: tuple[str, str]) -> PreTrainedTokenizerFast:
        """A tokenizer of characters that merges some pairs."""
        letters = sorted({*"abcdefghijklmnopqrstuvwxyz: \n123456789", *"Ġ"})
        vocabulary = {piece: place for place, piece in enumerate([*letters, *("".join(merge) for merge in merges)])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    def test_space_that_merges_with_the_rating_belongs_to_it(self) -> None:
        tokenizer = self.merging(*((" ", digit) for digit in "12345"))
        found = resolve(tokenizer, ["the answer: ", "b: "], 5, variants="strict")
        assert found.without_space
        assert found.context("the answer: ") == "the answer:"
        assert [tokenizer.convert_ids_to_tokens(list(ids)) for ids in found.ids] == [[f" {d}"] for d in "12345"]

    @pytest.mark.real
    def test_the_published_cue_works_with_the_bundled_model(self) -> None:
        """Its tokenizer splits the white space at the end of the cue in another way once a digit follows."""
        from finetune.models import load_tokenizer

        tokenizer = load_tokenizer("bundled:smollm2-135m-instruct")
        found = resolve(tokenizer, ["a: \n", "The answer is: \n"], 5, variants="strict")
        assert [list(ids) for ids in found.ids] == [[33], [34], [35], [36], [37]]
        assert not found.without_space

    def test_digits_that_merge_with_the_cue_are_named(self) -> None:
        tokenizer = self.merging(*((":", digit) for digit in "123"))
        with pytest.raises(ConfigError) as caught:
            resolve(tokenizer, ["a:", "b:"], 3, variants="strict")
        assert "':1'" in caught.value.got
        assert caught.value.where == "select.scorer.cue"
        assert "1, 2, 3" in caught.value.want

    def test_ratings_that_are_one_token_are_refused(self) -> None:
        vocabulary = {piece: place for place, piece in enumerate([*"abcdefghijklmnopqrstuvwxyz: ", "?"])}
        unknown = models.BPE(vocab=vocabulary, merges=[], unk_token="?")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(unknown), unk_token="?")
        with pytest.raises(ConfigError, match="every rating as one token of its own") as caught:
            resolve(tokenizer, ["a: ", "b: "], 3, variants="strict")
        assert "'?'" in caught.value.got

    def test_variants_are_added_up(self) -> None:
        tokenizer = self.merging(*((" ", digit) for digit in "12345"))
        found = resolve(tokenizer, ["a:", "b:"], 5, variants="merge")
        assert [tokenizer.convert_ids_to_tokens(list(ids)) for ids in found.ids] == [[d, f" {d}"] for d in "12345"]

    def test_two_digits_are_refused(self) -> None:
        with pytest.raises(ConfigError) as caught:
            build_scorer({"name": "selectit", "scale": 10})
        assert caught.value.where == "select.scorer.scale"


class TestPrompts:
    def test_ours_say_the_scale_and_which_end_is_best(self) -> None:
        prompts = read_prompts(None, 5, 7)
        assert len(set(prompts)) == 5
        assert all("7" in prompt and "best" in prompt and "\n" not in prompt for prompt in prompts)
        assert max(map(len, prompts)) < 1.3 * min(map(len, prompts))

    def test_others_come_from_a_file_and_change_the_hash(self, tmp_path: Path) -> None:
        (tmp_path / "prompts.txt").write_text("Rate it, 1 to {scale}.\n\n How good? \r\n")
        own = read_prompts(str(tmp_path / "prompts.txt"), 2, 5)
        assert own == ["Rate it, 1 to 5.", "How good?"]
        assert prompt_hash(own) != prompt_hash(read_prompts(None, 5, 5))
        with pytest.raises(ConfigError) as caught:
            read_prompts(str(tmp_path / "prompts.txt"), 3, 5)
        assert caught.value.want == "at most 2"
        with pytest.raises(ConfigError) as caught:
            read_prompts(str(tmp_path / "prompt.txt"), 1, 5)
        assert caught.value.near == "prompts.txt"
        (tmp_path / "latin.txt").write_bytes(b"Rate it, 1 \xe0 5.")
        for unreadable in (tmp_path / "latin.txt", tmp_path):
            with pytest.raises(ConfigError, match="cannot be read"):
                read_prompts(str(unreadable), 1, 5)

    def test_the_published_form(self) -> None:
        form = RatingForm("official", chat=False, cue="The answer is: \n", assistant_prefix="")
        text = form.text("Rate.", Exchange("I", "R"), tiny_tokenizer())
        assert text == "Rate.\n\nInstruction:I\nResponse:R\nThe answer is: \n"


def published_loop(rater: Rater, pool: tuple[Example, ...], *, prompts: int = 5) -> list[float]:
    """The published code in float32: one text at a time, all logits, two softmaxes, an explicit sum of distances."""
    tokenizer, found = rater.tokenizer, []
    digits = [tokenizer("\n" + str(k), add_special_tokens=False)["input_ids"][-1] for k in range(1, 6)]
    for example in pool:
        question, answer = (message.content for message in example.conversation.messages)
        scores = []
        for prompt in RATING_PROMPTS[:prompts]:
            asked = prompt.format(scale=5)
            text = f"{asked}\n\nInstruction:{question}\nResponse:{answer}\nThe answer is: \n"
            with torch.no_grad():
                logits = rater.model(**tokenizer(text, return_tensors="pt")).logits[0, -1]
            p = torch.softmax(logits, -1)[digits]
            p = torch.softmax(p / p.sum(), -1)
            best = int(p.argmax())
            scores.append((best + 1) * float((p - p[best]).abs().sum()) / 4)
        found.append(statistics.fmean(scores) / (1 + 0.2 * statistics.pstdev(scores)))
    return found


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gpt2])
def rater(request: Any) -> Rater:
    return Rater(request.param(), tiny_tokenizer())


def scores_of(rater: Rater, pool: tuple[Example, ...], **config: Any) -> list[float]:
    scorer = build_scorer({"name": "selectit", **config})
    scorer.check(pool, rater.tokenizer)
    scorer.begin(rater, pool)
    measured = scorer.measure(rater, pool)
    return [score.value for score in scorer.score_pool(pool, [[row] for row in measured])]  # type: ignore[list-item]


class TestScores:
    def test_official_mode_is_the_published_loop(self, rater: Rater) -> None:
        pool = examples(rater.tokenizer)
        found = scores_of(rater, pool, normalization="official")
        assert found == pytest.approx(published_loop(rater, pool), abs=1e-5)

    def test_fewer_prompts_read_all_ratings(self, rater: Rater) -> None:
        pool = examples(rater.tokenizer)
        found = scores_of(rater, pool, normalization="official", num_prompts=3)
        assert found == pytest.approx(published_loop(rater, pool, prompts=3), abs=1e-5)

    def test_one_prompt_is_the_token_level(self, rater: Rater) -> None:
        pool = examples(rater.tokenizer)
        found = scores_of(rater, pool, normalization="official", num_prompts=1)
        assert found == pytest.approx(published_loop(rater, pool, prompts=1), abs=1e-5)

    @pytest.mark.parametrize("order", ["official", "example_first"])
    @pytest.mark.parametrize("form", ["plain", "chat"])
    def test_sharing_and_batches_change_nothing(
        self, order: str, form: str, rater: Rater, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool = examples(rater.tokenizer)
        config = {"order": order, "form": form, "assistant_prefix": "Score:\n"}
        shared = scores_of(rater, pool, **config)
        with monkeypatch.context() as patched:
            patched.setattr(prefixes, "_TREE_TOKENS", 300)
            patched.setattr(prefixes, "_TOKENS_AT_A_TIME", 500)
            assert scores_of(rater, pool, **config) == pytest.approx(shared, abs=1e-5)
        monkeypatch.setattr("finetune.data_selection.engine.prefixes.can_share", lambda rater, probes: False)
        alone = [scores_of(rater, (example,), **config)[0] for example in pool]
        assert shared == pytest.approx(alone, abs=1e-5)

    def test_several_models_count_by_their_parameters(self) -> None:
        pool = examples(tiny_tokenizer())[:1]
        scorer = build_scorer({"name": "selectit", "models": ["small", "large"], "num_prompts": 1})
        assert scorer.models("the recipe's") == ["small", "large"]
        evidence = [
            {"log_p": [[math.log(p) for p in probabilities]], "parameters": size}
            for probabilities, size in zip(A[:2], (1, 3), strict=True)
        ]
        assert scorer.score(pool[0], *evidence).value == pytest.approx((1.875 + 3 * 2.0) / 4)
        with pytest.raises(ConfigError, match="every model has a weight"):
            build_scorer({"name": "selectit", "weights": [0.5, 0.5]}).check(pool, tiny_tokenizer())

    def test_a_conversation_is_rated_as_a_whole_or_by_its_last_turn(self, rater: Rater) -> None:
        both = examples(rater.tokenizer, [(*PAIRS[0], *PAIRS[1])])
        last = examples(rater.tokenizer, [PAIRS[1]])
        assert scores_of(rater, both, turns="last") == pytest.approx(scores_of(rater, last), abs=1e-5)
        joined = (PAIRS[0][0], f"{PAIRS[0][1]}\nInstruction:{PAIRS[1][0]}\nResponse:{PAIRS[1][1]}")
        assert scores_of(rater, both) == pytest.approx(scores_of(rater, examples(rater.tokenizer, [joined])), abs=1e-5)

    @pytest.mark.parametrize("order", ["official", "example_first"])
    def test_each_turn_may_be_rated_by_itself(self, rater: Rater, order: str) -> None:
        rows = [(*PAIRS[0], *PAIRS[1], *PAIRS[2]), PAIRS[3], (*PAIRS[4], *PAIRS[5])]
        alone = scores_of(rater, examples(rater.tokenizer, PAIRS[:6]), order=order)
        expected = [sum(alone[:3]) / 3, alone[3], sum(alone[4:6]) / 2]
        found = scores_of(rater, examples(rater.tokenizer, rows), order=order, turns="mean")
        assert found == pytest.approx(expected, abs=1e-5)

    def test_a_long_answer_loses_its_middle_and_nothing_else(self) -> None:
        tokenizer = tiny_tokenizer()
        scorer: Any = build_scorer({"name": "selectit"})
        long = "start " + "every day at noon " * 200 + "end"
        pool = examples(tokenizer, [("Tell me when.", long)], max_length=9999)
        questions = scorer._ask(tokenizer, pool)
        (question,) = questions.of(pool[0], 300)
        assert question.truncated
        assert max(map(len, question.tokens)) <= 300
        for prompt, tokens in zip(RATING_PROMPTS, question.tokens, strict=True):
            text = tokenizer.decode(tokens)
            assert text.startswith(prompt.format(scale=5) + "\n\nInstruction:Tell me when.\nResponse:start every")
            assert text.endswith("noon end\nThe answer is: \n")
        assert not questions.of(pool[0], None)[0].truncated
        with pytest.raises(UnscorableError, match="does not fit"):
            questions.of(pool[0], 20)

    def test_an_instruction_is_cut_only_where_the_answer_is_gone(self) -> None:
        tokenizer = tiny_tokenizer()
        scorer: Any = build_scorer({"name": "selectit", "num_prompts": 1})
        pool = examples(tokenizer, [("ask " + "at noon " * 300 + "thus", "the lazy dog")], max_length=9999)
        text = tokenizer.decode(scorer._ask(tokenizer, pool).of(pool[0], 200)[0].tokens[0])
        assert "\nResponse: … \nThe answer is: \n" in text
        assert "Instruction:ask at" in text


class TestSharing:
    def test_a_model_that_looks_back_less_is_not_trusted_with_it(self) -> None:
        rater = Rater(tiny_gemma2(), tiny_tokenizer(), "gemma")
        with pytest.warns(FinetuneWarning, match="prefixes are not shared in gemma"):
            assert not can_share(rater, [[[5, 6, 7], [5, 6, 8]]])

    def test_the_probe_finds_a_model_that_ignores_the_mask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rater = Rater(tiny_llama(), tiny_tokenizer(), "careless")
        forward = rater._body.forward
        monkeypatch.setattr(rater._body, "forward", lambda attention_mask=None, **rest: forward(**rest))
        families = [[[5, 6, 7, 8], [5, 6, 9, 10]]]
        with pytest.warns(FinetuneWarning, match="changes its hidden states"):
            assert not can_share(rater, families)
        plain = last_hidden(rater, families, shared=False)
        assert torch.equal(plain, torch.cat([rater.last_hidden(families[0])]))

    def test_a_common_beginning_is_computed_once(self, rater: Rater) -> None:
        computed = []
        hook = rater._body.register_forward_pre_hook(
            lambda module, given, named: computed.append(named["input_ids"].numel()), with_kwargs=True
        )
        try:
            last_hidden(rater, [[[*range(5, 45), number] for number in range(60, 64)]], shared=True)
        finally:
            hook.remove()
        assert computed == [44]


class TestDiagnoses:
    def evidence(self, probabilities: list[float], is_rating: float) -> Any:
        return [[{"log_p": [[math.log(p) for p in probabilities]], "likeliest_is_rating": is_rating}]] * 10

    def test_a_model_that_does_not_answer_is_named_with_the_consequence(self) -> None:
        scorer = build_scorer({"name": "selectit"})
        notes = scorer.diagnose(self.evidence([0.05, 0.02, 0.02, 0.02, 0.01], 0.0))
        assert [note.partition(",")[0] for note in notes] == [
            "the ratings have 12% of the next token's probability on average",
            "100% of all ratings are 1",
            "after 100% of the prompts the likeliest token is no rating",
        ]
        assert all("close to noise" in note for note in notes)

    def test_a_model_that_answers_is_not(self) -> None:
        scorer = build_scorer({"name": "selectit"})
        rows = self.evidence([0.1, 0.1, 0.1, 0.1, 0.5], 1.0) + self.evidence([0.5, 0.1, 0.1, 0.1, 0.1], 1.0)
        assert scorer.diagnose(rows) == []


def test_measurements_are_kept_where_only_the_arithmetic_changes() -> None:
    first = build_scorer({"name": "selectit"}).fingerprint()
    assert build_scorer({"name": "selectit", "alpha": 0.5, "normalization": "official"}).fingerprint() == first
    assert build_scorer({"name": "selectit", "num_prompts": 3}).fingerprint() != first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first["prompt_set"] == prompt_hash(read_prompts(None, 5, 5))
