"""Forms of overrides, and which arguments are recipes."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.config.overrides import parse_overrides, split_arguments
from finetune.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "key", "action", "value"),
    [
        ("a.b=c", "a.b", "set", "c"),
        ("--a.b=c", "a.b", "set", "c"),
        ("--a.b-c=1", "a.b_c", "set", 1),
        ("a=b=c=d", "a", "set", "b=c=d"),
        ("a=2e-4", "a", "set", 2e-4),
        ("a=012", "a", "set", 12),
        ("a=null", "a", "set", None),
        ("a='null'", "a", "set", "null"),
        ("a=", "a", "set", None),
        ("a=[q, 2]", "a", "set", ["q", 2]),
        ("a={b: 1}", "a", "set", {"b": 1}),
        ("a=You are: helpful, 'really'", "a", "set", "You are: helpful, 'really'"),
        ("a=*", "a", "set", "*"),
        ("a=x\ny", "a", "set", "x\ny"),
        ("a.b+=x", "a.b", "append", "x"),
        ("a.0.b=1", "a.0.b", "set", 1),
        ("~a.b", "a.b", "delete", None),
    ],
)
def test_forms(text: str, key: str, action: str, value: Any) -> None:
    (override,) = parse_overrides([text])
    assert (override.key, override.action, override.value, override.origin) == (key, action, value, "argument 1")


def test_all_arguments_that_are_no_overrides_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["foo", "a=1", "=x", "a=[1"])
    assert [problem.where.partition(":")[0] for problem in caught.value.problems] == [
        "argument 1",
        "argument 3",
        "argument 4",
    ]


def test_recipes_and_overrides_are_told_apart() -> None:
    arguments = ["base.yaml", "a=1", "lora/quickstart", "--b.c", "-1", "--d=2", "~e", "runs/lr=1/config.yaml"]
    configs, overrides = split_arguments(arguments)
    assert configs == ["base.yaml", "lora/quickstart", "runs/lr=1/config.yaml"]
    assert overrides == ["a=1", "b.c=-1", "--d=2", "~e"]


@pytest.mark.parametrize("arguments", [["--a.b"], ["--a.b", "--c.d", "1"]])
def test_an_option_without_a_value_is_an_error(arguments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        split_arguments(arguments)
    assert "--a.b" in caught.value.what


def test_a_misspelt_option_of_the_verb_is_answered_with_it() -> None:
    with pytest.raises(ConfigError) as caught:
        split_arguments(["r.yaml", "--overwrit", "a=1"], flags=["--overwrite", "--resume"])
    assert caught.value.near == "--overwrite"
    assert split_arguments(["--output-dir", "x"], flags=["--overwrite", "--output"])[1] == ["output-dir=x"]
