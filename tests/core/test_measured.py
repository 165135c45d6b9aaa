"""A measured choice is made once per machine, whichever process asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.core.measured import measured_choice


def test_the_first_answer_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    assert measured_choice("best", lambda: "a") == "a"
    assert measured_choice("best", lambda: pytest.fail("measured again")) == "a"
    assert measured_choice("another", lambda: "b") == "b"


def test_a_damaged_file_and_one_that_cannot_be_written_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    (tmp_path / "measured.json").write_text("{")
    assert measured_choice("best", lambda: "a") == "a"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "file" / "cache"))
    assert measured_choice("best", lambda: "c") == "c"
