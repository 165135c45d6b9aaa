"""What trains where, as the command prints it, is what the page says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "more-than-one-device.md"


def test_the_methods_that_the_table_refuses_are_those_that_the_page_names() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "finetune", "ls", "engines", "--json"], capture_output=True, text=True, check=True
    )
    rows = json.loads(printed.stdout)
    for strategy in ("fsdp", "hsdp"):
        refused = {row["method"] for row in rows if row[strategy] != "yes"}
        lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if " | refused" in line]
        assert refused == set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in lines)))
    assert {row["ddp"] for row in rows} == {"yes"}
