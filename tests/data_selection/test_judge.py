"""A chat model as the judge: over HTTP against a server of our own, and on this machine."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from finetune.config.load import load_recipe
from finetune.core.errors import ConfigError
from finetune.data.records import Message
from finetune.data_selection import build_scorer
from finetune.data_selection.base import Unscored
from finetune.data_selection.chat.answer import Answer
from finetune.data_selection.chat.cache import AnswerCache
from finetune.data_selection.chat.config import ChatConfig, bill
from finetune.data_selection.chat.endpoint import Endpoint
from finetune.data_selection.engine.failures import Isolated
from finetune.data_selection.engine.rater import Rater
from finetune.models.generate import generate
from finetune.selection.run import select
from support.chat_server import chat_server, completion
from support.pools import PAIRS, examples
from support.tiny import save_tiny_model, tiny_llama, tiny_tokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


SPENT = {"prompt_tokens": 7, "new_tokens": 2, "cached": False}
ASKED = [[Message("user", f"question {number}")] for number in range(6)]


class TestEndpoint:
    def test_asks_in_the_protocol_and_answers_in_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MY_KEY", "secret")

        def reply(content: dict[str, Any]) -> Any:
            number = int(content["messages"][0]["content"].split()[1])
            time.sleep(0.02 * (6 - number))  # later questions are answered first
            return completion(str(number))

        with chat_server(reply) as (url, requests):
            answers = Endpoint(url, "judge-1", key_variable="MY_KEY").ask(ASKED, max_new_tokens=9)
        assert answers == [Answer(str(number), 7, 2) for number in range(6)]
        first = next(request for request in requests if request["messages"][0]["content"] == "question 0")
        assert first == {
            "model": "judge-1",
            "messages": [{"role": "user", "content": "question 0"}],
            "temperature": 0,
            "max_tokens": 9,
            "path": "/v1/chat/completions",
            "key": "Bearer secret",
        }

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_tries_again_what_may_pass(self, status: int) -> None:
        replies = itertools.chain(
            [(status, {"Retry-After": "0"}, b""), (status, {}, b"")], itertools.repeat(completion("3"))
        )
        with chat_server(lambda content: next(replies)) as (url, requests):
            assert Endpoint(url, "m", first_wait=0.01).ask(ASKED[:1], max_new_tokens=9) == [Answer("3", 7, 2)]
        assert len(requests) == 3

    def test_gives_up_after_so_many_attempts(self) -> None:
        with chat_server(lambda content: (500, {}, b"")) as (url, requests):
            found = Endpoint(url, "m", attempts=3, first_wait=0.01).ask(ASKED[:1], max_new_tokens=9)
        assert found == [Unscored("the endpoint did not answer", "HTTP 500, 3 attempts")]
        assert len(requests) == 3

    def test_an_answer_that_takes_too_long_is_one_that_did_not_come(self) -> None:
        def reply(content: dict[str, Any]) -> Any:
            time.sleep(0.5)
            return completion("3")

        with chat_server(reply) as (url, _):
            (found,) = Endpoint(url, "m", attempts=2, timeout=0.05, first_wait=0.01).ask(ASKED[:1], max_new_tokens=9)
        assert isinstance(found, Unscored)
        assert "Timeout" in found.detail

    def test_nobody_at_the_address(self) -> None:
        (found,) = Endpoint("http://127.0.0.1:9/v1", "m", attempts=1).ask(ASKED[:1], max_new_tokens=9)
        assert isinstance(found, Unscored)
        assert "ConnectError" in found.detail

    @pytest.mark.parametrize(("status", "part"), [(401, "key"), (403, "key"), (404, "model or path")])
    def test_what_never_passes_ends_it_at_once(self, status: int, part: str) -> None:
        with chat_server(lambda content: (status, {}, b"no")) as (url, requests):
            with pytest.raises(ConfigError, match=part) as caught:
                Endpoint(url, "judge-1").ask(ASKED[:1], max_new_tokens=9)
            assert len(requests) == 1
        assert caught.value.where == "select.scorer.endpoint"
        assert "judge-1" in caught.value.got

    @pytest.mark.parametrize(
        ("status", "body", "reason"),
        [
            (400, b"too long", "refused the row"),
            (200, b"<html>", "no chat completion"),
            (200, b"[]", "no chat completion"),
            (200, b'{"choices": []}', "no chat completion"),
            (200, b'{"choices": [{"message": {"content": null}}]}', "has no text"),
        ],
    )
    def test_nonsense_has_a_reason(self, status: int, body: bytes, reason: str) -> None:
        with chat_server(lambda content: (status, {}, body)) as (url, requests):
            (found,) = Endpoint(url, "m").ask(ASKED[:1], max_new_tokens=9)
        assert isinstance(found, Unscored)
        assert reason in found.reason
        assert len(requests) == 1

    def test_keeps_to_the_rate(self) -> None:
        with chat_server(lambda content: completion("1")) as (url, _):
            start = time.monotonic()
            Endpoint(url, "m", per_minute=600).ask(ASKED, max_new_tokens=9)
        assert time.monotonic() - start >= 5 * 0.1


class TestCache:
    def test_the_same_request_is_not_made_twice_by_threads_or_runs(self, tmp_path: Path) -> None:
        cache = AnswerCache(tmp_path / "deep" / "answers.sqlite")
        with chat_server(lambda content: completion(content["messages"][0]["content"])) as (url, requests):
            first = Endpoint(url, "m", cache=cache).ask(ASKED, max_new_tokens=9)
            again = Endpoint(url, "m", cache=AnswerCache(tmp_path / "deep" / "answers.sqlite")).ask(
                ASKED, max_new_tokens=9
            )
            assert len(requests) == len(ASKED)
            assert [answer.text for answer in again] == [answer.text for answer in first]  # type: ignore[union-attr]
            assert all(answer.cached for answer in again)  # type: ignore[union-attr]
            Endpoint(url, "m", cache=cache).ask(ASKED, max_new_tokens=8)
            Endpoint(url, "n", cache=cache).ask(ASKED, max_new_tokens=9)
            assert len(requests) == 3 * len(ASKED)  # another limit, another model: other requests

    def test_failures_are_not_kept(self, tmp_path: Path) -> None:
        replies = iter([(400, {}, b"no"), completion("3")])
        cache = AnswerCache(tmp_path / "answers.sqlite")
        with chat_server(lambda content: next(replies)) as (url, _):
            endpoint = Endpoint(url, "m", cache=cache)
            assert isinstance(endpoint.ask(ASKED[:1], max_new_tokens=9)[0], Unscored)
            assert endpoint.ask(ASKED[:1], max_new_tokens=9) == [Answer("3", 7, 2)]

    def test_the_bill_by_hand(self) -> None:
        answers = [Answer("", 1000, 10), Answer("", 500, 20), Answer("", 9999, 9999, cached=True)]
        config = ChatConfig(prompt_price=2.0, answer_price=8.0)
        assert bill(config, [answer.spent for answer in answers]) == {
            "answers": 3,
            "from_cache": 1,
            "prompt_tokens": 1500,
            "new_tokens": 30,
            "cost": pytest.approx((1500 * 2 + 30 * 8) / 1e6),
        }
        assert bill(ChatConfig(), [])["cost"] is None


class TestJudge:
    @pytest.mark.parametrize(
        ("text", "rating"),
        [("4.5", 4.5), (" 3\nbecause", 3.0), ("0", 0.0), ("5", 5.0)]
        + [(text, None) for text in ("Score: 4", "6", "-1", "nan", "", "four", "\n\n")],
    )
    def test_the_first_line_is_a_number_or_there_is_no_score(self, text: str, rating: float | None) -> None:
        with chat_server(lambda content: completion(text)) as (url, _):
            scorer = build_scorer({"name": "judge", "endpoint": url, "model": "m"})
            (found,) = scorer.measurer(0, "m", lambda name: pytest.fail("loads nothing"), ())(
                examples(tiny_tokenizer())[:1]
            )
        if rating is None:
            assert found == Unscored("the judge gave no rating", repr(text), SPENT)
        else:
            assert found == {"rating": rating, **SPENT}

    def test_an_endpoint_without_address_or_model_is_answered(self) -> None:
        pool = examples(tiny_tokenizer())
        for config, where in [({"endpoint": "localhost"}, "endpoint"), ({"endpoint": "http://localhost/v1"}, "model")]:
            with pytest.raises(ConfigError) as caught:
                build_scorer({"name": "judge", **config}).check(pool, tiny_tokenizer())
            assert caught.value.where == f"select.scorer.{where}"

    def test_a_wrong_key_ends_the_run_with_one_request_per_row_of_a_batch_at_most(self) -> None:
        pool = examples(tiny_tokenizer())
        with chat_server(lambda content: (401, {}, b"")) as (url, requests):
            scorer = build_scorer({"name": "judge", "endpoint": url, "model": "m", "parallel": 1})
            with pytest.raises(ConfigError, match="key"):
                Isolated(scorer.measurer(0, "m", lambda name: pytest.fail("loads nothing"), pool))(pool)
        assert len(requests) <= len(pool)

    def test_a_model_on_this_machine_writes_what_it_writes_alone(self) -> None:
        rater = Rater(tiny_llama(), tiny_tokenizer())
        scorer: Any = build_scorer({"name": "judge", "max_new_tokens": 4})
        pool = examples(rater.tokenizer)[:3]
        measured = scorer.measurer(0, "m", lambda name: rater, pool)(pool)
        from finetune.data.render import render_prompt

        for example, found in zip(pool, measured, strict=True):
            prompt = render_prompt(scorer._question(example), rater.tokenizer)
            (text,) = generate(rater.model, rater.tokenizer, [prompt], max_new_tokens=4, batch_size=1)
            assert (found.reason, found.detail) == ("the judge gave no rating", repr(text))  # a random model's

    def test_a_selection_asks_again_only_about_what_failed(self, tmp_path: Path) -> None:
        save_tiny_model(tmp_path / "model")
        rows = [{"prompt": asked, "completion": said} for asked, said in PAIRS]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        broken = True

        def reply(content: dict[str, Any]) -> Any:
            asked = content["messages"][0]["content"]
            if broken and "Name a dog." in asked:
                return 500, {}, b""
            return completion(str(len(asked) % 6))

        with chat_server(reply) as (url, requests):
            scorer = {"name": "judge", "endpoint": url, "model": "m", "attempts": 1}
            overrides = [
                f"model.name_or_path={tmp_path / 'model'}",
                f"data.train={tmp_path / 'rows.jsonl'}",
                f"select={json.dumps({'scorer': scorer, 'top': 3, 'batch_tokens': 1})}",
                f"output_dir={tmp_path / 'out'}",
            ]
            first = select(load_recipe([], overrides))
            assert first.manifest["counts"]["unscored"] == {"the endpoint did not answer": 1}
            assert first.exit_code == 1  # more than a hundredth of the rows
            assert len(requests) == len(PAIRS)
            broken = False
            second = select(load_recipe([], overrides), resume=True)
            assert (second.exit_code, len(requests)) == (0, len(PAIRS) + 1)
            assert second.manifest["counts"]["scored"] == len(PAIRS)
            assert second.manifest["spent"] == {
                "answers": len(PAIRS),
                "from_cache": 0,
                "prompt_tokens": 7 * len(PAIRS),
                "new_tokens": 2 * len(PAIRS),
                "cost": None,
            }
            third = select(load_recipe([], [*overrides[:-1], f"output_dir={tmp_path / 'elsewhere'}"]))
        assert third.manifest["spent"]["from_cache"] == len(PAIRS)
        assert len(requests) == len(PAIRS) + 1
