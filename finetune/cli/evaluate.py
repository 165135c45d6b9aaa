"""``finetune eval``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.options import AsJson, Base, MaxNewTokens, Target
from finetune.cli.output import print_json, print_table
from finetune.cli.settings import Settings

if TYPE_CHECKING:
    from finetune.evaluation.results import TaskResult

EXAMPLES = """
finetune eval runs/quickstart
finetune eval bundled:smollm2-135m-instruct --task exact_match:data/test.jsonl --limit 100
"""


def evaluate(
    context: typer.Context,
    target: Target,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Task name, task file, KIND:DATA or lm-eval:NAME; repeatable.")
    ] = None,
    base: Base = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Most rows per task.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Rows per batch.")] = 16,
    max_new_tokens: MaxNewTokens = 64,
    output: Annotated[Path | None, typer.Option("--output", help="JSON file; a run has eval/final.json.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measures a model on tasks; without --task on those of its recipe."""
    from finetune.evaluation.run import evaluate_run

    settings: Settings = context.obj
    results = evaluate_run(
        target,
        task or (),
        base=base,
        limit=limit,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        output=output,
        console=settings.console(),
    )
    if as_json:
        print_json([result.as_dict() for result in results])
        return
    rows = [row for result in results for row in _rows(result)]
    print_table(rows, ["task", "metric", "value", "95 % interval", "examples"])


def _rows(result: TaskResult) -> list[list[str]]:
    def shown(value: float) -> str:
        return f"{value:.1%}" if result.is_share else f"{value:.4f}"

    interval = f"{shown(result.low)} to {shown(result.high)}"
    groups = [["", f"  {name}", shown(value), "", str(count)] for name, (value, count) in result.groups.items()]
    return [[result.task, result.metric, shown(result.value), interval, str(result.n)], *groups]
