"""``finetune env``."""

from __future__ import annotations

from finetune.cli.options import AsJson
from finetune.cli.output import print_json

EXAMPLES = """
finetune env
finetune env --json > environment.json
"""


def env(as_json: AsJson = False) -> None:
    """Reports versions, devices and memory, for bug reports."""
    from finetune.environment import environment_report

    report = environment_report()
    if as_json:
        print_json(report)
        return
    for section, entries in report.items():
        for number, (name, value) in enumerate(entries.items()):
            print(f"{section if number == 0 else '':<10} {name:<16} {value if value is not None else '-'}".rstrip())
