"""Writes the quickstart's data: a schedule in words -> the five fields of a crontab line.

Everything is drawn from SHA-256 in counter mode, so the bytes depend on this file alone and not on a Python version.
Two promises about the test rows, which ``tests/recipes/test_make_data.py`` checks:

* values are held out: no crontab line of a test row is the answer of any training row, in any family;
* phrasings are held out for a stated share: the rows with ``"group": "unseen_phrasing"`` (27 %) use sentence patterns
  that no training row uses, the others (``seen_phrasing``) patterns that training rows use with other values.

Steps are divisors of 60 or 24, for which ``*/n`` means what the words say. Days and months are written by name, as
crontab(5) allows.

Run ``python -m finetune.recipes.quickstart.make_data [FOLDER]`` to write ``train.jsonl`` and ``test.jsonl`` again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

__all__ = ["FAMILIES", "Family", "main", "make_rows"]

Item = TypeVar("Item")

TRAIN_ROWS = 1600
TEST_ROWS = 300
UNSEEN_SHARE = 0.27
HELD_OUT_PERCENT = 12
DAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
DAYS_IN_MONTH = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
MINUTE_STEPS = (2, 3, 4, 5, 6, 10, 12, 15, 20, 30)
HOUR_STEPS = (2, 3, 4, 6, 8, 12)
# Around what a family says of the days, ``{when}``, stands the time, ``{t}``.
FRAMES = ("{when} at {t}", "at {t} {when}", "{when}, {t}", "run {when} at {t}", "run at {t} {when}", "{t} {when}")
UNSEEN_FRAMES = ("at {t}, {when}", "start {when} at {t}")


class Draws:
    """Uniform draws from SHA-256 of a key and a counter: the same on every machine and Python version."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._count = 0

    def below(self, limit: int) -> int:
        """Returns an integer in [0, ``limit``)."""
        self._count += 1
        digest = hashlib.sha256(f"{self._key}/{self._count}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % limit

    def one_of(self, items: Sequence[Item]) -> Item:
        """Returns one of ``items``."""
        return items[self.below(len(items))]


Words = dict[str, str]
Draw = Callable[[Draws], tuple[Words, str]]


@dataclass(frozen=True)
class Family:
    """One kind of schedule.

    Attributes:
        draw: Draws a value: the words that fill the patterns, and the crontab line.
        weight: Share of the rows, relative to the other families.
        seen: Patterns of training rows (and of the test rows with a seen phrasing).
        unseen: Patterns that only test rows use.
    """

    draw: Draw
    weight: float
    seen: tuple[str, ...]
    unseen: tuple[str, ...]


def _minute(draws: Draws) -> int:
    kind = draws.below(100)
    if kind < 40:
        return 0
    return 5 * draws.below(12) if kind < 75 else draws.below(60)


def _time(draws: Draws) -> tuple[str, str]:
    """Returns a time of day in words and its first two crontab fields (minute, hour)."""
    hour, minute = draws.below(24), _minute(draws)
    if draws.below(4):
        return f"{hour}:{minute:02d}", f"{minute} {hour}"
    if hour % 12 == 0:
        return ("noon" if hour else "midnight"), f"0 {hour}"
    return f"{hour % 12} {'am' if hour < 12 else 'pm'}", f"0 {hour}"


def _abbreviated(name: str) -> str:
    return name[:3].lower()


def _minutes_step(draws: Draws) -> tuple[Words, str]:
    step = draws.one_of(MINUTE_STEPS)
    choices = [("", "*"), (" on weekdays", "1-5"), (" on weekends", "6,0")]
    choices += [(f" on {name}s", _abbreviated(name)) for name in DAYS]
    days, field = draws.one_of(choices)
    return {"n": str(step), "days": days}, f"*/{step} * * * {field}"


def _hourly(draws: Draws) -> tuple[Words, str]:
    minute = 1 + draws.below(59)
    return {"m": str(minute)}, f"{minute} * * * *"


def _hours_step(draws: Draws) -> tuple[Words, str]:
    step, minute = draws.one_of(HOUR_STEPS), _minute(draws)
    tail = f" at minute {minute}" if minute else ""
    return {"n": str(step), "tail": tail}, f"{minute} */{step} * * *"


def _daily(draws: Draws) -> tuple[Words, str]:
    time, fields = _time(draws)
    return {"t": time}, f"{fields} * * *"


def _weekdays(draws: Draws) -> tuple[Words, str]:
    time, fields = _time(draws)
    return {"t": time}, f"{fields} * * 1-5"


def _weekends(draws: Draws) -> tuple[Words, str]:
    time, fields = _time(draws)
    return {"t": time}, f"{fields} * * 6,0"


def _day_of_week(draws: Draws) -> tuple[Words, str]:
    (time, fields), day = _time(draws), draws.one_of(DAYS)
    return {"t": time, "d": day}, f"{fields} * * {_abbreviated(day)}"


def _day_of_month(draws: Draws) -> tuple[Words, str]:
    (time, fields), day = _time(draws), 1 + draws.below(28)
    return {"t": time, "day": str(day), "th": _ordinal(day)}, f"{fields} {day} * *"


def _date(draws: Draws) -> tuple[Words, str]:
    (time, fields), month = _time(draws), draws.below(12)
    day = 1 + draws.below(DAYS_IN_MONTH[month])
    words = {"t": time, "day": str(day), "month": MONTHS[month]}
    return words, f"{fields} {day} {_abbreviated(MONTHS[month])} *"


def _ordinal(number: int) -> str:
    suffix = "th" if 10 < number < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def _timed(draw: Draw, weight: float, seen: Sequence[str], unseen: Sequence[str]) -> Family:
    """Returns a family whose patterns are frames around what is said of the days; unseen is either of the two."""
    return Family(
        draw,
        weight,
        tuple(frame.replace("{when}", when) for when in seen for frame in FRAMES),
        tuple(frame.replace("{when}", when) for when in unseen for frame in FRAMES)
        + tuple(frame.replace("{when}", when) for when in seen for frame in UNSEEN_FRAMES),
    )


FAMILIES: dict[str, Family] = {
    "minutes_step": Family(
        _minutes_step,
        0.8,
        ("every {n} minutes{days}", "each {n} minutes{days}", "once every {n} minutes{days}",
         "run every {n} minutes{days}", "every {n} min{days}"),
        ("start every {n} minutes{days}", "once each {n} minutes{days}"),
    ),
    "hourly": Family(
        _hourly,
        0.5,
        ("every hour at minute {m}", "{m} minutes past every hour", "hourly at minute {m}",
         "{m} minutes after each hour", "run every hour at minute {m}"),
        ("each hour at minute {m}", "{m} minutes past each hour"),
    ),
    "hours_step": Family(
        _hours_step,
        0.6,
        ("every {n} hours{tail}", "each {n} hours{tail}", "once every {n} hours{tail}", "run every {n} hours{tail}"),
        ("start every {n} hours{tail}", "once each {n} hours{tail}"),
    ),
    "daily": _timed(_daily, 1.0, ("every day", "daily", "each day"), ("once a day",)),
    "weekdays": _timed(
        _weekdays, 1.0, ("on weekdays", "every weekday", "on working days"), ("each weekday",)
    ),
    "weekends": _timed(_weekends, 1.0, ("on weekends", "every weekend", "on Saturdays and Sundays"), ("each weekend",)),
    "day_of_week": _timed(_day_of_week, 1.4, ("on {d}s", "every {d}", "each {d}", "on {d}"), ("once a week on {d}",)),
    "day_of_month": _timed(
        _day_of_month,
        1.4,
        ("on the {th}", "on day {day} of the month", "on the {th} of each month", "monthly on the {th}"),
        ("every month on the {th}",),
    ),
    "date": _timed(
        _date,
        1.4,
        ("on {month} {day}", "every {month} {day}", "on {day} {month}", "each year on {month} {day}"),
        ("once a year on {month} {day}",),
    ),
}  # fmt: skip


def _is_held_out(line: str) -> bool:
    return Draws(f"held out/{line}").below(100) < HELD_OUT_PERCENT


def _sizes(total: int) -> dict[str, int]:
    """Returns rows per family, summing to ``total`` (largest remainders)."""
    weights = sum(family.weight for family in FAMILIES.values())
    exact = {name: total * family.weight / weights for name, family in FAMILIES.items()}
    sizes = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: sizes[name] - exact[name])
    for name in by_remainder[: total - sum(sizes.values())]:
        sizes[name] += 1
    return sizes


def _rows(split: str, group: str, total: int) -> list[dict[str, str]]:
    """Returns ``total`` rows of distinct prompts, families interleaved in a drawn order."""
    rows = []
    for name, count in _sizes(total).items():
        family, draws = FAMILIES[name], Draws(f"{split}/{group}/{name}")
        patterns = family.unseen if group == "unseen_phrasing" else family.seen
        prompts: set[str] = set()
        while len(prompts) < count:
            words, line = family.draw(draws)
            prompt = draws.one_of(patterns).format(**words)
            if _is_held_out(line) == (split == "test") and prompt not in prompts:
                prompts.add(prompt)
                rows.append({"prompt": prompt, "completion": line, "group": group, "family": name})
    return sorted(rows, key=lambda row: hashlib.sha256(f"{split}/{row['prompt']}".encode()).digest())


def make_rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Returns the training rows and the test rows, each with ``prompt`` and ``completion``.

    Test rows also say their ``group`` (``seen_phrasing`` or ``unseen_phrasing``) and ``family``.
    """
    unseen = round(TEST_ROWS * UNSEEN_SHARE)
    train = [
        {"prompt": row["prompt"], "completion": row["completion"]}
        for row in _rows("train", "seen_phrasing", TRAIN_ROWS)
    ]
    test = _rows("test", "seen_phrasing", TEST_ROWS - unseen) + _rows("test", "unseen_phrasing", unseen)
    return train, test


def main(folder: Path) -> None:
    """Writes ``train.jsonl`` and ``test.jsonl`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train.jsonl", "test.jsonl"), make_rows(), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
