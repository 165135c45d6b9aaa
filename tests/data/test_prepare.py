"""Rendering, loss masks, truncation, packing, caching."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.core.errors import DataError
from finetune.data.collate import PackingCollator, PaddingCollator
from finetune.data.inspect import inspect_rows
from finetune.data.packing import pack
from finetune.data.prepare import prepare_dataset, split_eval
from finetune.data.records import Conversation, Message
from finetune.data.render import IGNORED, render, render_prompt
from finetune.data.templates import resolve_template, template_names
from support.tiny import tiny_gpt2, tiny_llama, tiny_tokenizer

TURNS = (
    Message("system", "S"),
    Message("user", "one"),
    Message("assistant", "eins"),
    Message("user", "two"),
    Message("assistant", "zwei"),
)


class Source:
    split, weight, format, subset, columns = None, 1.0, None, None, None

    def __init__(self, path: Path, task: str | None = None) -> None:
        self.path, self.task = str(path), task


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def conversation(messages: tuple[Message, ...] = TURNS, **options: Any) -> Conversation:
    return Conversation(messages, "0", "memory", None, **options)


def rows_file(folder: Path, answers: list[str], prompt: str = "p") -> Source:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": a}) + "\n" for a in answers))
    return Source(path)


def learned(encoded: Any, tokenizer: Any) -> str:
    return tokenizer.decode([label for label in encoded.labels if label != IGNORED])


@pytest.mark.parametrize(
    ("loss_on", "expected"),
    [
        ("assistant", "eins<|im_end|>zwei<|im_end|>"),
        ("last", "zwei<|im_end|>"),
        ("completion", "zwei<|im_end|>"),
    ],
)
def test_the_loss_is_on_answers_and_their_end_of_turn_only(loss_on: Any, expected: str) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    encoded = render(conversation(), tokenizer, loss_on=loss_on)
    assert learned(encoded, tokenizer) == expected
    assert encoded.ends_with_eos


def test_loss_on_all_and_plain_text() -> None:
    tokenizer = tiny_tokenizer()
    whole = tokenizer.apply_chat_template([vars(m) for m in TURNS], tokenize=False)
    assert learned(render(conversation(), tokenizer, loss_on="all"), tokenizer) == whole.rstrip()
    plain = render(conversation((), text="Once"), tokenizer, loss_on="assistant")
    assert learned(plain, tokenizer) == "Once<|im_end|>"


def test_the_prompt_is_the_start_of_the_training_example_for_every_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot_id|>", "<end_of_turn>"]})
    turns = TURNS[1:3]
    for name in template_names():
        tokenizer.chat_template = resolve_template(name, tokenizer)
        encoded = render(conversation(turns), tokenizer, loss_on="last")
        prompt = render_prompt(turns[:1], tokenizer)
        assert encoded.input_ids[: len(prompt)] == prompt, name
        assert all(label == IGNORED for label in encoded.labels[: len(prompt)])
        assert encoded.labels[len(prompt)] == encoded.input_ids[len(prompt)], name
        assert encoded.ends_with_eos == (name != "plain"), name  # a word of several goes on as any text does


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages|length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(DataError, match="does not render a conversation as the start"):
        render(conversation(), tokenizer, loss_on="assistant")


def test_a_template_that_raises_is_a_data_error() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError) as caught:
        render(conversation(), tokenizer, loss_on="assistant")
    assert "no system role" in caught.value.got


def test_templates_by_name_file_and_mistake(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    assert resolve_template("tokenizer", tokenizer) == tokenizer.chat_template
    (tmp_path / "own.jinja").write_text("{{ 1 }}")
    assert resolve_template(str(tmp_path / "own.jinja"), tokenizer) == "{{ 1 }}"
    with pytest.raises(DataError) as caught:
        resolve_template("chatlm", tokenizer)
    assert caught.value.near == "chatml"
    tokenizer.chat_template = None
    with pytest.raises(DataError) as caught:
        resolve_template("tokenizer", tokenizer)
    assert caught.value.fix == "data.chat_template: chatml"


def test_long_rows_are_dropped_or_cut_by_policy(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    source = rows_file(tmp_path, ["a", "b" * 10], prompt="q" * 40)
    lengths = prepare_dataset([source], tokenizer, max_length=1000).dataset["length"]
    limit = min(lengths)
    dropped = prepare_dataset([source], tokenizer, max_length=limit, max_dropped=0.5)
    assert (dropped.examples, [row.reason for row in dropped.dropped]) == (1, ["longer than data.max_length"])
    assert dropped.dropped[0].line == 2
    left = prepare_dataset([source], tokenizer, max_length=limit, truncation="left")
    assert "[bbbbbbbbbb<|im_end|>]" in left.example(1)
    assert left.dataset["length"] == [limit, limit]
    right = prepare_dataset([source], tokenizer, max_length=limit, truncation="right")
    assert "bbbb<|im_end|>" not in right.example(1)


def test_too_many_dropped_rows_stop_the_run_with_counts(tmp_path: Path) -> None:
    source = rows_file(tmp_path, ["a"] * 8 + ["b" * 200] * 2)
    with pytest.raises(DataError) as caught:
        prepare_dataset([source], tiny_tokenizer(), max_length=64)
    assert caught.value.what == "2 of 10 rows cannot be used"
    assert "2 longer than data.max_length" in caught.value.got


def test_no_row_with_a_label_is_an_error(tmp_path: Path) -> None:
    source = rows_file(tmp_path, ["a"] * 3, prompt="long prompt " * 20)
    with pytest.raises(DataError, match="no row is left") as caught:
        prepare_dataset([source], tiny_tokenizer(), max_length=20, truncation="right", max_dropped=1.0)
    assert "3 no token carries loss" in caught.value.got


def test_a_token_beyond_the_embedding_is_named(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(DataError) as caught:
        prepare_dataset([rows_file(tmp_path, ["a"])], tokenizer, vocabulary_size=100)
    assert "the model has 100" in caught.value.got


def test_the_cache_gives_the_same_and_follows_content_and_options(tmp_path: Path) -> None:
    tokenizer, source = tiny_tokenizer(), rows_file(tmp_path, ["a", "b"])
    first = prepare_dataset([source], tokenizer)
    again = prepare_dataset([source], tokenizer)
    assert first.dataset[:] == again.dataset[:]
    assert first.fingerprint == again.fingerprint
    assert len(list((tmp_path / "cache" / "data").iterdir())) == 1
    changed = {
        prepare_dataset([source], tokenizer, max_length=99).fingerprint,
        prepare_dataset([rows_file(tmp_path, ["a", "c"])], tokenizer).fingerprint,
    }
    assert len({first.fingerprint, *changed}) == 3


def test_tasks_are_the_column_else_the_sources_else_the_files_name(tmp_path: Path) -> None:
    source = rows_file(tmp_path, ["a"])
    (tmp_path / "named.jsonl").write_text('{"prompt": "p", "completion": "b", "task": "own"}\n')
    sources = [source, Source(Path(source.path), task="mine"), Source(tmp_path / "named.jsonl", task="not this")]
    prepared = prepare_dataset(sources, tiny_tokenizer(), tasks=True)
    assert prepared.dataset["task"][:] == ["rows", "mine", "own"]
    assert prepared.tasks == ("mine", "own", "rows")
    assert PaddingCollator(pad_token_id=2)([prepared.dataset[1], prepared.dataset[2]])["tasks"] == ["mine", "own"]
    plain = prepare_dataset(sources, tiny_tokenizer())
    assert plain.tasks == ()
    assert "tasks" not in PaddingCollator(pad_token_id=2)([plain.dataset[1]])
    renamed = [Source(Path(source.path), task="other"), *sources[1:]]
    assert prepare_dataset(renamed, tiny_tokenizer(), tasks=True).fingerprint != prepared.fingerprint


def test_tasks_are_those_of_the_rows_that_are_left(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "a", "task": 0}] * 9 + [{"prompt": "p", "completion": "b" * 200, "task": "x"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"tasks": True, "max_length": 64}
    assert prepare_dataset([Source(path)], tiny_tokenizer(), **options).tasks == ("0",)
    whole = prepare_dataset([Source(path)], tiny_tokenizer(), tasks=True)
    parts = split_eval(whole, 1, seed=0)
    assert sorted(len(part.dataset.unique("task")) for part in parts) == sorted(len(part.tasks) for part in parts)


def test_a_weight_draws_the_same_rows_however_the_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = rows_file(tmp_path, [str(i) for i in range(20)])
    source.weight = 0.4
    monkeypatch.chdir(tmp_path)
    relative = Source(Path("rows.jsonl"))
    relative.weight = 0.4
    first, second = (prepare_dataset([one], tiny_tokenizer()) for one in (source, relative))
    assert first.examples == 8
    assert first.fingerprint == second.fingerprint


def test_held_out_rows_leave_the_training_rows(tmp_path: Path) -> None:
    prepared = prepare_dataset([rows_file(tmp_path, [str(i) for i in range(10)])], tiny_tokenizer())
    train, held_out = split_eval(prepared, 0.2, seed=0)
    assert (train.examples, held_out.examples) == (8, 2)
    texts = [part.example(i) for part in (train, held_out) for i in range(part.examples)]
    assert sorted(texts) == sorted(prepared.example(i) for i in range(10))
    with pytest.raises(DataError, match="nothing to train on"):
        split_eval(prepared, 10, seed=0)


def test_padding_is_by_position_and_absent_where_nothing_is_padded() -> None:
    collate = PaddingCollator(pad_token_id=2)
    batch = collate([{"input_ids": [5, 2], "labels": [-100, 2]}, {"input_ids": [5, 6, 2], "labels": [-100, 6, 2]}])
    assert batch["labels"].tolist() == [[-100, 2, -100], [-100, 6, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert "attention_mask" not in collate([{"input_ids": [5], "labels": [5]}])


def test_packing_fills_rows_and_loses_nothing() -> None:
    lengths = [7, 5, 5, 3, 2, 2, 1]
    rows = pack(lengths, 10)
    assert sorted(position for row in rows for position in row) == list(range(7))
    assert all(sum(lengths[position] for position in row) <= 10 for row in rows)
    assert len(rows) == 3  # 25 tokens need at least three rows of 10


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_give_the_logits_of_each_alone(tmp_path: Path, build: Any, attention: str) -> None:
    model = build()
    model.set_attn_implementation(attention)
    answers = ["a", "bb b", "c c c c c", "dd", "e" * 9]
    source = rows_file(tmp_path, answers)
    alone = prepare_dataset([source], tiny_tokenizer())
    packed = prepare_dataset([source], tiny_tokenizer(), packing=True, max_length=60)
    assert 1 < len(packed.dataset) < len(answers)
    batch = PackingCollator()(list(packed.dataset))
    expected = {tuple(ids): model(torch.tensor([ids])).logits[0] for ids in alone.dataset["input_ids"]}
    labels = dict(zip(map(tuple, alone.dataset["input_ids"]), alone.dataset["labels"], strict=True))
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    seen = 0
    for row, documents in enumerate(packed.dataset["documents"]):
        start = 0
        for length in documents:
            place = slice(start, start + length)
            ids = tuple(batch["input_ids"][row, place].tolist())
            torch.testing.assert_close(logits[row, place], expected[ids], atol=1e-5, rtol=1e-5)
            assert batch["labels"][row, place].tolist() == labels[ids]
            start += length
            seen += 1
    assert seen == len(answers)


def test_inspect_shows_each_token_with_its_loss(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    prepared = prepare_dataset([rows_file(tmp_path, ["a"])], tokenizer)
    (row,) = inspect_rows(prepared, tokenizer, 1)
    assert row["text"].endswith("[a<|im_end|>]\n")
    assert [token["text"] for token in row["tokens"] if token["loss"]] == ["a", "<|im_end|>"]
