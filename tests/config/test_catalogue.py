"""The catalogue of keys says in words what a key takes."""

from __future__ import annotations

from finetune.config.catalogue import describe_fields
from finetune.methods import discover


def test_types_are_words() -> None:
    keys = {key.name: key.type for key in describe_fields(discover().get("id3").Config, "")}
    assert keys["budget"] == "number | whole number"
    assert keys["scope.include"] == "list of text | null"
    assert keys["schedule"] == "uniform | frontload"
    every = [key.type for name in discover() for key in describe_fields(discover().get(name).Config, "")]
    assert not any("Annotated" in words for words in every)
