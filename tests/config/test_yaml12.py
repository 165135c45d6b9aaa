"""YAML 1.2 scalars, positions, and what is said of text that is not YAML."""

from __future__ import annotations

import math
from typing import Any

import pytest

from finetune.config.yaml12 import dump_yaml, flow_yaml, read_yaml, resolve_scalar
from finetune.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-4", 2e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-1.", -1.0),
        ("012", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("-3", -3),
        ("true", True),
        ("FALSE", False),
        ("yes", "yes"),
        ("on", "on"),
        ("no", "no"),
        ("null", None),
        ("~", None),
        ("", None),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("-.inf", -math.inf),
        ("1e", "1e"),
        ("0b11", "0b11"),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: Any) -> None:
    for found in (resolve_scalar(text), read_yaml(f"key: {text}", "a.yaml").data["key"]):
        assert found == value
        assert type(found) is type(value)


def test_quoted_scalars_are_text() -> None:
    data = read_yaml("a: '2e-4'\nb: \"true\"\nc: |\n  12\n", "a.yaml").data
    assert data == {"a": "2e-4", "b": "true", "c": "12\n"}


def test_positions_are_those_of_the_keys_and_items() -> None:
    document = read_yaml("a:\n  b: 1\n  c:\n    - x\n    - d: 2\n", "a.yaml")
    assert document.positions == {
        "a": ("a.yaml", 1),
        "a.b": ("a.yaml", 2),
        "a.c": ("a.yaml", 3),
        "a.c.0": ("a.yaml", 4),
        "a.c.1": ("a.yaml", 5),
        "a.c.1.d": ("a.yaml", 5),
    }


def test_every_key_that_is_given_twice_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n", "a.yaml")
    assert [(problem.where, problem.got) for problem in caught.value.problems] == [
        ("a.yaml:4:3  b.c", "first in line 3"),
        ("a.yaml:5:1  a", "first in line 1"),
    ]


@pytest.mark.parametrize(
    ("text", "place", "word"),
    [
        ("a:\n\tb: 1\n", "a.yaml:2:1", "tab"),
        ("a:\n  b: 1\n c: 2\n", "a.yaml:3:2", "not YAML"),
        ("a: b: c\n", "a.yaml:1:5", "not YAML"),
        ("a: [1, 2\n", "a.yaml:2:1", "not YAML"),
        ("a: 1\n---\nb: 2\n", "a.yaml:2:1", "document"),
        ("a: !thing 3\n", "a.yaml:1:4", "!thing"),
        ("a: &x [*x]\n", "a.yaml:1:4", "alias"),
        ("? [a]\n: 1\n", "a.yaml:1:3", "key"),
        ("a: *x\n", "a.yaml:1:4", "alias"),
        ("a: \x00\n", "a.yaml", "not YAML"),
    ],
)
def test_what_is_not_yaml_is_reported_with_line_and_column(text: str, place: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "a.yaml")
    assert caught.value.where == place
    assert word in caught.value.what


def test_an_anchor_may_be_used_again() -> None:
    assert read_yaml("a: &x {b: 1}\nc: *x\n", "a.yaml").data == {"a": {"b": 1}, "c": {"b": 1}}


def test_what_is_written_is_read_back_unchanged() -> None:
    data = {
        "numbers": [2e-4, 1e-05, 1.0, 12, -3, math.inf],
        "texts": ["2e-4", "012", "true", "yes", "null", "", " x ", "a: b", "- c", "#", "'", "é\n", "0o7", "1_0"],
        "others": [True, None, [], {}],
        "long": "word " * 100,
    }
    assert read_yaml(dump_yaml(data), "a.yaml").data == data


def test_one_line_is_as_it_would_be_typed() -> None:
    assert flow_yaml(True) == "true"
    assert flow_yaml(["q_proj", 1]) == "[q_proj, 1]"
    assert flow_yaml("2e-4") == "'2e-4'"
