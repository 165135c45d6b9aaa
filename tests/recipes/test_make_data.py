"""The quickstart's data: reproducible to the byte, held out as promised, right as crontab lines."""

from __future__ import annotations

import calendar
import datetime
import json
import re
from importlib import resources
from pathlib import Path

import pytest

from finetune.recipes.quickstart.make_data import FAMILIES, main, make_rows


@pytest.fixture(scope="module")
def rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    return make_rows()


def test_committed_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    main(tmp_path)
    shipped = resources.files("finetune.recipes") / "quickstart"
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (shipped / name).read_bytes()


def test_no_prompt_and_no_answer_of_the_test_rows_is_in_the_training_rows(
    rows: tuple[list[dict[str, str]], list[dict[str, str]]],
) -> None:
    train, test = rows
    for field in ("prompt", "completion"):
        assert not {row[field] for row in train} & {row[field] for row in test}
    assert len({row["prompt"] for row in train}) == len(train)
    assert len({row["prompt"] for row in test}) == len(test)


def _pattern_words(pattern: str) -> str:
    """Returns a pattern's fixed words; the fields differ from row to row."""
    return "".join(part.split("}")[-1] for part in pattern.split("{"))


def test_unseen_phrasings_are_held_out_for_the_stated_share(
    rows: tuple[list[dict[str, str]], list[dict[str, str]]],
) -> None:
    groups = [row["group"] for row in rows[1]]
    assert set(groups) == {"seen_phrasing", "unseen_phrasing"}
    assert groups.count("unseen_phrasing") / len(groups) == pytest.approx(0.27)
    for family in FAMILIES.values():
        assert not set(family.seen) & set(family.unseen)
    # A clock time holds no brace, so a training prompt that used an unseen pattern would contain its fixed words.
    train = [row["prompt"] for row in rows[0]]
    for phrase in (
        "start every",
        "once a day",
        "each weekday",
        "each weekend",
        "once a week",
        "every month on",
        "once a year",
    ):
        assert any(phrase in _pattern_words(pattern) for family in FAMILIES.values() for pattern in family.unseen)
        assert not any(phrase in prompt for prompt in train)


_LIMITS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
_ABBREVIATED = {
    3: [name.lower() for name in calendar.month_abbr if name],
    4: [name.lower() for name in calendar.day_abbr],
}


def test_answers_are_valid_crontab_lines(rows: tuple[list[dict[str, str]], list[dict[str, str]]]) -> None:
    for row in [*rows[0], *rows[1]]:
        fields = row["completion"].split(" ")
        assert len(fields) == 5
        for place, (field, (low, high)) in enumerate(zip(fields, _LIMITS, strict=True)):
            if place > 2 and field in _ABBREVIATED[place]:
                continue
            numbers = field.removeprefix("*").removeprefix("/").replace("-", ",").split(",")
            assert all(low <= int(number) <= high for number in numbers if number), row
            if "-" in field:
                assert int(numbers[0]) < int(numbers[1]), row


_NAMES = re.compile("|".join(calendar.day_name))
_CLOCK = re.compile(r"(\d+(?::\d\d)? (?:am|pm)|\d+:\d\d|noon|midnight)")


def _reference_fields(clock: str) -> str:
    """Returns minute and hour as the standard library reads a time of day."""
    text = {"noon": "12:00", "midnight": "0:00"}.get(clock, clock)
    form = "%H:%M" if not text.endswith("m") else "%I:%M %p" if ":" in text else "%I %p"
    time = datetime.datetime.strptime(text, form)
    return f"{time.minute} {time.hour}"


def test_times_are_what_the_standard_library_reads(
    rows: tuple[list[dict[str, str]], list[dict[str, str]]],
) -> None:
    clocks = [(row, match) for row in [*rows[0], *rows[1]] if (match := _CLOCK.search(row["prompt"]))]
    assert len(clocks) > 1200
    for row, match in clocks:
        assert row["completion"].startswith(_reference_fields(match[1]) + " "), row
    assert {"noon", "midnight"} <= {match[1] for _, match in clocks}


def test_day_and_month_names_are_what_the_calendar_says(
    rows: tuple[list[dict[str, str]], list[dict[str, str]]],
) -> None:
    for row in [*rows[0], *rows[1]]:
        *_, month, day = row["completion"].split(" ")
        named = [
            calendar.day_abbr[list(calendar.day_name).index(name)].lower() for name in _NAMES.findall(row["prompt"])
        ]
        if named:
            assert day == ("6,0" if named == ["sat", "sun"] else named[0]), row
        months = [number for number in range(1, 13) if calendar.month_name[number] in row["prompt"]]
        assert month == (calendar.month_abbr[months[0]].lower() if months else "*"), row


def test_every_line_of_the_files_is_a_json_object() -> None:
    for name in ("train.jsonl", "test.jsonl"):
        text = (resources.files("finetune.recipes") / "quickstart" / name).read_text(encoding="utf-8")
        assert all({"prompt", "completion"} <= json.loads(line).keys() for line in text.splitlines())
