"""What a run says before it starts and after it ends, and what ``run.json`` records of the plan."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from finetune import __version__
from finetune.report.record import next_commands
from finetune.training.activations import activation_lines, away_lines
from finetune.training.streaming import streaming_lines, traffic_lines

if TYPE_CHECKING:
    from finetune.config.load import LoadedRecipe
    from finetune.planning.memory import MemoryEstimate
    from finetune.training.plan import Plan

__all__ = ["describe_end", "describe_plan", "describe_record"]


def describe_record(
    loaded: LoadedRecipe, plan: Plan, estimate: MemoryEstimate, before: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the fields of ``run.json`` that are known before the first step."""
    recipe, model, summary = plan.recipe, plan.model, plan.method.summary()
    config: Any = model.config
    metadata = plan.method.metadata()
    return {
        "device": {"type": str(model.device), "name": _device_name(model.device), "threads": torch.get_num_threads()},
        "world_size": plan.arguments.world_size,
        "seed": recipe.seed,
        "model": {
            "name_or_path": recipe.model.name_or_path,
            "dtype": _name(model.dtype),
            "attn_implementation": config._attn_implementation,
            "parameters": summary.total,
            "fingerprint": metadata["base_fingerprint"],
            "tied": bool(config.tie_word_embeddings),
        },
        "method": {
            "name": summary.name,
            "config": metadata["config"],
            "paper": plan.method.paper,
            "kind": plan.method.kind,
            "stock": plan.method.stock,
            "trained": summary.trained,
            "total": summary.total,
            "share": summary.share,
            "chosen": list(summary.chosen),
        },
        "data": {
            "examples": plan.train.examples,
            "eval_examples": 0 if plan.evaluation is None else plan.evaluation.examples,
            "tokens": plan.train.tokens,
            "label_tokens": plan.train.label_tokens,
            "dropped": dict(Counter(row.reason for row in plan.train.dropped)),
            "fingerprint": plan.train.fingerprint,
            "example": plan.train.example(0),
        },
        "plan": {
            "steps": plan.steps,
            "epochs": plan.arguments.num_train_epochs,
            "per_device_batch": plan.arguments.per_device_train_batch_size,
            "accumulation": plan.arguments.gradient_accumulation_steps,
            "world_size": plan.arguments.world_size,
        },
        "memory": {
            "estimate_bytes": {**estimate.parts, "peak": estimate.peak},
            "base_bytes": 2 * summary.total,
            "measured_peak_bytes": None,
            "saved_bytes": None,
        },
        "final": {"loss": None, "eval_loss": None},
        "streaming": None,
        "activations_away_bytes": None,
        "evaluation": {"before": before, "after": []},
        "config_resolved": loaded.resolved_yaml(),
    }


def describe_plan(plan: Plan, estimate: MemoryEstimate, run: Path) -> str:
    """Returns the block that is printed before the first step: what trains, on what, how long, in how much memory."""
    recipe, model, summary, data = plan.recipe, plan.model, plan.method.summary(), plan.train
    config: Any = model.config
    dropped = Counter(row.reason for row in data.dropped)
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    evaluation = "" if plan.evaluation is None else f"   eval {plan.evaluation.examples:,} examples"
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in estimate.parts.items() if size >= 5e6)
    arguments = plan.arguments
    geometry = (
        f"{arguments.per_device_train_batch_size} x {arguments.gradient_accumulation_steps} x {arguments.world_size}"
    )
    example = data.example(0).replace("\n", "\\n")
    lines = [
        ("finetune", f"{__version__}   torch {torch.__version__} · transformers {transformers.__version__}"),
        (
            "model",
            f"{recipe.model.name_or_path}  {summary.total / 1e6:.1f} M params  {_name(model.dtype)}  "
            f"{config._attn_implementation} attention  on {_device_name(model.device)}"
            + ("  tied embeddings" if config.tie_word_embeddings else ""),
        ),
        ("method", f"{summary.name}  trains {summary.trained:,} of {summary.total:,} parameters ({summary.share:.2%})"),
        *(("", line) for line in summary.chosen),
        (
            "data",
            f"{data.examples:,} examples"
            + (f" ({sum(dropped.values())} dropped: {reasons})" if dropped else "")
            + f"  {data.tokens:,} tokens, {data.label_tokens / max(1, data.tokens):.0%} carry loss"
            + evaluation,
        ),
        ("plan", f"{plan.steps:,} steps of {geometry} examples, {arguments.num_train_epochs:g} epochs"),
        (
            "memory",
            f"estimate {estimate.peak / 1e9:.2f} GB peak ({parts})  free {estimate.available / 1e9:.1f} GB",
        ),
        *streaming_lines(plan),
        *activation_lines(recipe.engine.offload),
        ("output", str(run)),
        ("example", f"{example}   (brackets = loss)"),
    ]
    return "\n".join(f"{label:<9}{text}" for label, text in lines)


def describe_end(run: Path, record: dict[str, Any]) -> str:
    """Returns the block that is printed after a completed run: what was gained, where it lies, what to type next."""
    memory, final = record["memory"], record["final"]
    numbers = [f"{final['steps']} steps in {_duration(record['seconds'])}"]
    numbers += [f"loss {final['loss']:.3f}"] if final["loss"] is not None else []
    numbers += [f"eval loss {final['eval_loss']:.3f}"] if final["eval_loss"] is not None else []
    peak, estimate = memory["measured_peak_bytes"], memory["estimate_bytes"]["peak"]
    numbers.append(f"peak memory {peak / 1e9:.2f} GB (estimate {estimate / 1e9:.2f})")
    saved = memory["saved_bytes"]
    lines = [
        ("done", " · ".join(numbers)),
        *traffic_lines(record["streaming"]),
        *away_lines(record["activations_away_bytes"]),
        *_evaluation_lines(record["evaluation"]),
        *(("warning", text) for text in record["warnings"]),
        (
            "saved",
            f"{run / 'final'}  {saved / 1e6:.1f} MB, {saved / memory['base_bytes']:.1%} of the model in bfloat16",
        ),
        ("report", str(run / "report.html")),
    ]
    lines += [("" if row else "next", command) for row, (command, _) in enumerate(next_commands(run, record))]
    return "\n".join(f"{label:<9}{text}" for label, text in lines)


def _evaluation_lines(evaluation: dict[str, list[dict[str, Any]]]) -> list[tuple[str, str]]:
    before = {(result["task"], result["metric"]): result for result in evaluation["before"]}
    lines = []
    for result in evaluation["after"]:
        metric = result["metric"]
        earlier = before.get((result["task"], metric))
        start = "" if earlier is None else f"{_value(metric, earlier['value'])} -> "
        bounds = (
            ""
            if result["low"] is None
            else f"95 % {_value(metric, result['low'])} to {_value(metric, result['high'])}, "
        )
        lines.append(
            (
                "task",
                f"{result['task']} {metric}  {start}{_value(metric, result['value'])}  ({bounds}{result['n']} rows)",
            )
        )
        for group, (value, count) in result["groups"].items():
            lines.append(("", f"  {group}: {_value(metric, value)} of {count} rows"))
    return lines


def _value(metric: str, value: float) -> str:
    return f"{value:.3f}" if metric in ("loss", "perplexity") else f"{value:.1%}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
