"""What a selection says before it starts and after it ends."""

from __future__ import annotations

import itertools
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from finetune import __version__
from finetune.data_selection.engine.run import Work
from finetune.report.figures import count_in_words, seconds_in_words, share_in_words
from finetune.selection.folder import SelectionFolder
from finetune.selection.plan import SelectionPlan
from finetune.selection.result import Selection

__all__ = ["describe_bill", "describe_end", "describe_plan", "next_command"]


def describe_plan(plan: SelectionPlan, work: Work, *, processes: int) -> str:
    """Returns the lines before a selection starts."""
    recipe, pool = plan.recipe, plan.pool
    sources = ", ".join(source.path for source in recipe.data.train)
    dropped = Counter(row.reason for row in pool.dropped)
    paper = f" ({plan.scorer.paper})" if plan.scorer.paper else ""
    lines = [
        f"finetune {__version__}",
        f"data     {sources}",
        f"         {len(pool.examples):,} rows, {count_in_words(sum(work.lengths))} tokens"
        + (f" ({_counts(dropped)} dropped)" if dropped else ""),
        f"scorer   {plan.scorer.name}{paper}  {_config(plan.scorer.config.model_dump(mode='json'))}".rstrip(),
        f"keep     the {plan.direction}, {_limits(plan)}",
    ]
    if work.models:
        done = len(work.done) * 100 // max(1, len(work.models) * len(work.batches))
        before = f", {done} % of it done before" if work.done else ""
        together = f" in {processes} processes" if processes > 1 else ""
        lines.append(f"model    {', then '.join(_in_turn(work.models))}")
        lines.append(f"plan     {work.rows_left():,} rows in {len(work.left):,} batches{together}{before}")
    return "\n".join(lines)


def describe_end(selection: Selection, folder: SelectionFolder, manifest: Mapping[str, Any]) -> str:
    """Returns the lines after a selection ended."""
    chosen, counts = selection.chosen, manifest["counts"]
    rate = f" · {manifest['rows_per_second']:.1f} rows/s" if manifest["rows_per_second"] else ""
    kept, pool = manifest["tokens"]["kept"], manifest["tokens"]["pool"]
    spread = manifest["score"]["kept"]
    lines = [
        f"done     {counts['scored']:,} rows scored in {seconds_in_words(manifest['seconds'])}{rate}",
        f"kept     {len(chosen):,} rows, {count_in_words(kept)} tokens, {share_in_words(kept / pool)} of all"
        f" · scores {spread['lowest']:.4g} to {spread['highest']:.4g}",
    ]
    without = {**counts["left_out"], **counts["unscored"]}
    lines += [f"left out {_counts(without)}"] if without else []
    lines += [describe_bill(manifest["spent"])] if manifest["spent"] else []
    lines += [f"saved    {folder.path / name}" for name in manifest["files"] if name.startswith("selected/")]
    lines += [f"         {folder.scores}  {folder.report}", f"next     {next_command(folder, manifest)}"]
    return "\n".join(lines)


def describe_bill(spent: Mapping[str, Any]) -> str:
    """Returns the line about what a chat model was asked."""
    cached = f", {spent['from_cache']:,} of them from the cache" if spent["from_cache"] else ""
    cost = "" if spent["cost"] is None else f" · cost {spent['cost']:.4g}"
    tokens = f"{count_in_words(spent['prompt_tokens'])} tokens read, {count_in_words(spent['new_tokens'])} written"
    return f"asked    {spent['answers']:,} answers{cached} · {tokens}{cost}"


def next_command(folder: SelectionFolder, manifest: Mapping[str, Any]) -> str:
    """Returns the command that trains on the subset."""
    subsets = [str(folder.path / name) for name in manifest["files"] if name.startswith("selected/")]
    train = f"data.train={subsets[0]}" if len(subsets) == 1 else f"data.train={json.dumps(subsets)}"
    words = ["finetune", "train", str(folder.recipe), train, f"output_dir={folder.path}-tuned"]
    return " ".join(map(shlex.quote, words))


def _in_turn(models: Sequence[str]) -> list[str]:
    """Returns the models in order, each once with how often it measures in a row."""
    turns = [(name, len(list(same))) for name, same in itertools.groupby(models)]
    return [name if count == 1 else f"{name}, {count} times" for name, count in turns]


def _limits(plan: SelectionPlan) -> str:
    section, scored = plan.recipe.select, len(plan.pool.examples)
    said = []
    if section.fraction is not None:
        said.append(f"{section.fraction:.3g} of {scored:,} rows")
    if section.top is not None:
        said.append(f"{section.top:,} rows")
    if section.budget is not None:
        said.append(f"{section.budget:,} tokens")
    if section.threshold is not None:
        said.append(f"to a score of {section.threshold:g}")
    if section.per_source is not None:
        said.append(f"{section.per_source} shares of the sources")
    return "at most " + ", ".join(said)


def _config(config: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in config.items() if isinstance(value, str | int | float))


def _counts(reasons: Mapping[str, int]) -> str:
    ordered: Sequence[tuple[str, int]] = Counter(reasons).most_common()
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)
