"""Selective reflection's arithmetic and reading, by hand."""

from __future__ import annotations

import pytest

from finetune.data_selection.pool import Exchange
from finetune.data_selection.reflection.choice import Origin, VersionScores, excluded, preferred
from finetune.data_selection.reflection.prompts import ask_for_instruction, ask_for_response, read_block

ORIGINAL, Q, A, QA = (VersionScores(*pair) for pair in ((0.70, 0.60), (0.82, 0.65), (0.75, 0.50), (0.85, 0.55)))


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"instruction": Q, "response": A, "both": QA}, "both"),
        ({"instruction": Q, "response": A, "both": VersionScores(0.85, 0.70)}, "instruction"),
        ({"instruction": VersionScores(0.68, 0.65), "response": A, "both": QA}, "response"),
        ({"instruction": Q}, "instruction"),
        ({"response": VersionScores(0.9, 0.60)}, "original"),  # not below
        ({}, "original"),
    ],
)
def test_the_student_prefers_the_harder_instruction_then_the_answer_that_fits(
    versions: dict[Origin, VersionScores], expected: Origin
) -> None:
    assert preferred({"original": ORIGINAL, **versions}) == expected


def test_what_is_left_out() -> None:
    assert excluded("both", QA, keep="improved") == ""
    assert excluded("instruction", Q, keep="all") == ""
    assert "no answer of the teacher" in excluded("instruction", Q, keep="improved")
    assert "instruction does not help" in excluded("both", VersionScores(1.0, 0.5), keep="all")
    assert "answer does not help" in excluded("both", VersionScores(0.5, 1.0), keep="all")


@pytest.mark.parametrize(
    ("answer", "text", "status"),
    [
        ("Weak.\n[Better answer]\nParis, on the Seine.\n[End of Better answer]\nDone.", "Paris, on the Seine.", "ok"),
        ("[better answer] cut off in the mid", "cut off in the mid", "ok"),
        ("no marker at all", "", "no marker"),
        ("[Better answer]a[End of Better answer][Better answer]b[End of Better answer]", "", "several blocks"),
        ("[Better answer]\n...\n[End of Better answer]", "", "the placeholder"),
        ("[Better answer]\n N/A. \n[End of Better answer]", "", "empty"),
        ("[Better answer][End of Better answer]", "", "empty"),
        ("", "", "no marker"),
    ],
)
def test_reads_one_block_or_says_why_there_is_none(answer: str, text: str, status: str) -> None:
    found = read_block(answer, "Better answer")
    assert (found.text, found.status) == (text, status)


def test_a_block_without_its_end_ends_where_the_next_begins() -> None:
    answer = "[New instruction]\nName two dogs.\n[New answer]\nRex and Bo."
    assert read_block(answer, "New instruction").text == "Name two dogs."
    assert read_block(answer, "New answer").text == "Rex and Bo."


def test_the_questions_show_the_pair_and_survive_braces() -> None:
    pair = Exchange("Write {json} and {0}.", "It is {}.")
    for ask in (ask_for_instruction, ask_for_response):
        text = ask(pair)[-1].content
        assert pair.instruction in text
        assert pair.answer in text
