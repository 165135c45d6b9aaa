"""What every benchmark shares: ``--quick`` and ``--json PATH``, a table, and claims as JSON.

A benchmark measures, says which goals hold, and exits 0 whatever it measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from finetune.core.files import write_json

__all__ = ["Claim", "argument_parser", "report"]


@dataclass(frozen=True)
class Claim:
    """One measured figure.

    Attributes:
        name: ``METHOD/FIGURE``, beginning with the registry name of the method or scorer that it is about.
        value: What was measured.
        unit: For example ``share``, ``seconds`` or ``bytes``.
        goal: What was promised, as ``>= 0.84`` or ``<= 100``; empty where nothing was.
        baseline: What the value is compared with, for example the figure before training.
    """

    name: str
    value: float
    unit: str
    goal: str = ""
    baseline: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the goal is reached; None where there is none."""
        if not self.goal:
            return None
        relation, bound = self.goal.split(" ")
        return self.value >= float(bound) if relation == ">=" else self.value <= float(bound)


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser that knows what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="less work, under 60 seconds; the figures say less")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the claims to this file")
    return parser


def report(title: str, claims: Sequence[Claim], path: Path | None) -> None:
    """Prints the claims as a table, and writes them with the environment to ``path`` if there is one."""
    from finetune.environment import environment_report

    table = Table("claim", "value", "unit", "baseline", "goal", "holds", title=title, title_justify="left")
    for claim in claims:
        baseline = "" if claim.baseline is None else f"{claim.baseline:.4g}"
        holds = {None: "", True: "yes", False: "no"}[claim.holds]
        table.add_row(claim.name, f"{claim.value:.4g}", claim.unit, baseline, claim.goal, holds)
    Console(width=120).print(table)
    if path is not None:
        entries = [{**asdict(claim), "holds": claim.holds} for claim in claims]
        write_json(path, {"environment": environment_report(), "claims": entries})
