"""The model card: ``README.md`` beside the learned state, with nothing that was not measured."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.core.files import write_text
from finetune.report.figures import bytes_in_words, count_in_words, seconds_in_words, share_in_words
from finetune.report.record import a_task, command_of, lookup, method_settings
from finetune.report.results import ResultRow, compare_results

__all__ = ["write_model_card"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def write_model_card(folder: Path, run: dict[str, Any]) -> Path:
    """Writes ``README.md``, a Hugging Face model card.

    Args:
        folder: The folder with the learned state.
        run: The content of ``run.json``; what it lacks is left out.

    Returns:
        The card's path.
    """
    sections = [
        _front_matter(run),
        _what_it_is(run),
        _how_to_load(run),
        _data(run),
        _method(run),
        _training(run),
        _results(run),
        _limits(run),
        _reproduce(run),
        _versions(run),
    ]
    path = folder / "README.md"
    write_text(path, "\n\n".join(section for section in sections if section) + "\n")
    return path


def _front_matter(run: Mapping[str, Any]) -> str:
    from ruamel.yaml import YAML

    base, kind = str(lookup(run, "model.name_or_path", "")), lookup(run, "method.kind")
    data: dict[str, Any] = {}
    # A local path or a bundled model's name means nothing to the hub, and a license is the base's to give.
    if _is_hub_name(base):
        data["base_model"] = base
        data["base_model_relation"] = "adapter" if kind == "adapter" else "finetune"
    data["library_name"] = "peft" if kind == "adapter" else "transformers"
    data["pipeline_tag"] = "text-generation"
    data["tags"] = ["finetune-toolkit", *([lookup(run, "method.name")] if lookup(run, "method.name") else [])]
    buffer = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(data, buffer)
    return f"---\n{buffer.getvalue()}---"


def _what_it_is(run: Mapping[str, Any]) -> str:
    base, method = lookup(run, "model.name_or_path", "a language model"), lookup(run, "method.name", "")
    examples = lookup(run, "data.examples")
    trained_on = f" on {examples:,} examples" if examples is not None else ""
    return f"# {_title(run)}\n\nWhat `{method}` learned when it fine-tuned {_code(base)}{trained_on}."


def _how_to_load(run: Mapping[str, Any]) -> str:
    base = str(lookup(run, "model.name_or_path", "BASE_MODEL"))
    task = "" if (name := a_task(run)) is None else f", task={json.dumps(name)}"
    stock = lookup(run, "method.stock") and not base.startswith("bundled:")
    if stock:
        load = (
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'folder = "."  # where this file is\n'
            f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({json.dumps(base)}), folder)"
        )
    else:
        load = (
            "import finetune\nfrom transformers import AutoTokenizer\n\n"
            'folder = "."  # where this file is\n'
            f"model = finetune.load({json.dumps(base)}, folder{task})"
        )
    rest = (
        "tokenizer = AutoTokenizer.from_pretrained(folder)  # with the chat template of the training\n"
        'messages = [{"role": "user", "content": "Hello"}]\n'
        "inputs = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n'
        ")\n"
        "answer = model.generate(**inputs, max_new_tokens=64)\n"
        'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))'
    )
    lines = _fence(f"{load}\n{rest}", "python")
    return f"## Load\n\n{lines}\n\nOr type `finetune chat .` in this folder."


def _data(run: Mapping[str, Any]) -> str:
    dropped = lookup(run, "data.dropped", {})
    labelled = lookup(run, "data.label_tokens")
    lines = [
        _item("training examples", _count(lookup(run, "data.examples"))),
        _item("held-out examples", _count(lookup(run, "data.eval_examples"))),
        _item("tokens", _count(lookup(run, "data.tokens"))),
        _item("tokens that carry loss", _count(labelled)),
        _item("dropped", ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())),
    ]
    return _section("Data", lines)


def _method(run: Mapping[str, Any]) -> str:
    share = lookup(run, "method.share")
    of_all = "" if share is None else f" ({share_in_words(share)} of the parameters)"
    trained = lookup(run, "method.trained")
    lines = [
        _item("method", _code(lookup(run, "method.name", ""))),
        _item("paper", lookup(run, "method.paper")),
        _item("trained", None if trained is None else f"{trained:,}{of_all}"),
        *(_item(_code(key), _code(value)) for key, value in method_settings(run).items() if value is not None),
    ]
    return _section("Method", lines)


def _training(run: Mapping[str, Any]) -> str:
    geometry = [lookup(run, f"plan.{key}") for key in ("per_device_batch", "accumulation", "world_size")]
    batch = None if None in geometry else "{} rows x {} accumulated x {} processes".format(*geometry)
    final, held_out = lookup(run, "final.loss"), lookup(run, "final.eval_loss")
    seconds, peak = run.get("seconds"), lookup(run, "memory.measured_peak_bytes")
    lines = [
        _item("steps", _count(lookup(run, "final.steps", lookup(run, "plan.steps")))),
        _item("batch", batch),
        _item("dtype", lookup(run, "model.dtype")),
        _item("device", lookup(run, "device.name", lookup(run, "device.type"))),
        _item("wall time", None if seconds is None else seconds_in_words(seconds)),
        _item("peak memory", None if peak is None else bytes_in_words(peak)),
        _item("final loss", None if final is None else f"{final:.4f}"),
        _item("held-out loss", None if held_out is None else f"{held_out:.4f}"),
    ]
    return _section("Training", lines)


def _results(run: Mapping[str, Any]) -> str:
    rows = compare_results(run.get("evaluation") or {})
    if not rows:
        return ""
    head = "| task | metric | examples | base | tuned |\n|---|---|---|---|---|\n"
    table = head + "\n".join(_table_row(row) for row in rows)
    return f"## Results\n\n{table}\n\nIn brackets: 95 % confidence interval. Measured by {_measured_by(run)}."


def _table_row(row: ResultRow) -> str:
    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    values = [
        "–" if value is None else value.text + (f" [{value.interval}]" if value.interval else "")
        for value in (row.before, row.after)
    ]
    name = f"{row.task}: {row.group}" if row.group else row.task
    return "| " + " | ".join(map(cell, (name, row.metric, f"{row.n:,}", *values))) + " |"


def _measured_by(run: Mapping[str, Any]) -> str:
    return _code(command_of(run)) if command_of(run) else "the run itself"


def _limits(run: Mapping[str, Any]) -> str:
    tasks = list(dict.fromkeys(row.task for row in compare_results(run.get("evaluation") or {})))
    if not tasks:
        return "## Limits\n\nNo task was evaluated, so nothing is known about the quality of the answers."
    return f"## Limits\n\nMeasured on {', '.join(map(_code, tasks))} only; what the tuning did elsewhere is unknown."


def _reproduce(run: Mapping[str, Any]) -> str:
    config = str(run.get("config_resolved") or "").strip()
    if not config:
        return ""
    fold = f"<details><summary>The whole configuration</summary>\n\n{_fence(config, 'yaml')}\n\n</details>"
    return f"## Reproduce\n\nSave this as `recipe.yaml` and type `finetune train recipe.yaml`.\n\n{fold}"


def _versions(run: Mapping[str, Any]) -> str:
    toolkit = lookup(run, "finetune.version")
    commit = lookup(run, "finetune.commit")
    own = None if toolkit is None else f"{toolkit}{f' ({commit})' if commit else ''}"
    lines = [_item("finetune-toolkit", own)]
    lines += [_item(name, version) for name, version in lookup(run, "versions", {}).items()]
    return _section("Versions", [*lines, _item("python", run.get("python"))])


def _title(run: Mapping[str, Any]) -> str:
    base = str(lookup(run, "model.name_or_path", "model")).removeprefix("bundled:").rstrip("/").rpartition("/")[2]
    return f"{base}, tuned with {lookup(run, 'method.name', 'finetune-toolkit')}"


def _section(title: str, lines: list[str]) -> str:
    kept = [line for line in lines if line]
    return f"## {title}\n\n" + "\n".join(kept) if kept else ""


def _item(label: str, value: Any) -> str:
    return "" if value in (None, "") else f"- {label}: {value}"


def _count(count: int | None) -> str | None:
    return None if count is None else count_in_words(count)


def _code(value: Any) -> str:
    text = str(value).replace("\n", " ")
    if not text:
        return ""
    ticks = "`" * (1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{ticks} {text} {ticks}" if len(ticks) > 1 else f"`{text}`"


def _fence(text: str, language: str) -> str:
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{ticks}{language}\n{text}\n{ticks}"


def _is_hub_name(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()
