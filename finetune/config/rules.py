"""What must hold between keys, and between a recipe and the files and packages it names: one function per rule."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from finetune.config.given import Given
from finetune.config.schema import Recipe, Source
from finetune.core.errors import FinetuneError, Problem, nearest
from finetune.core.shipped import SHIPPED, shipped_path

__all__ = ["RULES", "broken_rules"]

Rule = Callable[[Recipe, Given], Problem | None]

_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".gz", ".txt", ".tsv")
_OFF = ("no", False)


def broken_rules(recipe: Recipe, given: Given) -> list[Problem]:
    """Returns what is wrong with a recipe whose keys are all valid, one by one."""
    return [problem for rule in RULES if (problem := rule(recipe, given)) is not None]


def _deepspeed_is_installed(recipe: Recipe, given: Given) -> Problem | None:
    if recipe.engine.strategy != "deepspeed" or importlib.util.find_spec("deepspeed") is not None:
        return None
    return Problem(
        "deepspeed is not installed",
        given.where("engine.strategy"),
        fix='pip install "finetune-toolkit[deepspeed]", or engine.strategy: fsdp, which needs nothing more',
    )


def _deepspeed_offloads(recipe: Recipe, given: Given) -> Problem | None:
    section = recipe.engine
    zero = section.strategy == "deepspeed"
    if section.offload.optimizer == "cpu" and not zero:
        return Problem(
            "only deepspeed keeps the optimizer's state elsewhere",
            given.where("engine.offload.optimizer"),
            fix="engine.strategy: deepspeed, or engine.offload.optimizer: none",
        )
    if zero and section.offload.weights != "none" and (section.offload.weights != "cpu" or section.deepspeed.stage < 3):
        return Problem(
            "deepspeed keeps weights elsewhere where it has taken them apart, in the CPU's memory",
            given.where("engine.offload.weights"),
            got=f"{section.offload.weights}, stage {section.deepspeed.stage}",
            fix="engine.offload.weights: cpu with engine.deepspeed.stage: 3",
        )
    return None


def _deepspeed_file_exists(recipe: Recipe, given: Given) -> Problem | None:
    config = recipe.engine.deepspeed.config
    if not isinstance(config, str) or Path(config).is_file():
        return None
    return _no_file(config, given.where("engine.deepspeed.config"))


def _streamed_once(recipe: Recipe, given: Given) -> Problem | None:
    """Blocks that are read from disk are computed again in the backward pass already."""
    if recipe.engine.offload.weights != "disk" or not recipe.train.get("activation_checkpointing"):
        return None
    return Problem(
        "blocks that are read from disk are computed again in the backward pass as it is",
        given.where("train.activation_checkpointing"),
        fix="train.activation_checkpointing: false",
    )


def _training_data_exist(recipe: Recipe, given: Given) -> Problem | None:
    return _first_missing(recipe.data.train, "data.train", given)


def _calibration_data_exist(recipe: Recipe, given: Given) -> Problem | None:
    return _first_missing(recipe.data.calibration or [], "data.calibration", given)


def _held_out_data_exist(recipe: Recipe, given: Given) -> Problem | None:
    return _first_missing(recipe.data.eval, "data.eval", given) if isinstance(recipe.data.eval, list) else None


def _first_missing(sources: list[Source], key: str, given: Given) -> Problem | None:
    for number, source in enumerate(sources):
        where = given.where(f"{key}.{number}.path")
        if source.path.startswith(SHIPPED):
            try:
                shipped_path(source.path)
            except FinetuneError as error:
                return Problem(error.what, where, got=source.path, near=error.near)
        elif Path(source.path).suffix in _DATA_SUFFIXES and not Path(source.path).exists():
            return _no_file(source.path, where)
    return None


def _template_exists(recipe: Recipe, given: Given) -> Problem | None:
    template = recipe.data.chat_template
    if not template.endswith(".jinja") or Path(template).is_file():
        return None
    return _no_file(template, given.where("data.chat_template"))


def _model_file_exists(recipe: Recipe, given: Given) -> Problem | None:
    path = recipe.model.name_or_path
    looks_local = path.startswith(("/", "./", "../", "~")) or path.endswith(".gguf")
    if not looks_local or Path(path).expanduser().exists():
        return None
    return _no_file(path, given.where("model.name_or_path"))


def _no_file(path: str, where: str) -> Problem:
    folder = Path(path).parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    near = nearest(Path(path).name, names)
    return Problem(f"there is no file {path}", where, near=str(folder / near) if near else "")


def _one_precision(recipe: Recipe, given: Given) -> Problem | None:
    if not (recipe.train.get("bf16") and recipe.train.get("fp16")):
        return None
    return Problem("bf16 and fp16 exclude each other", given.where("train.fp16"), fix="train.fp16: false")


def _held_out_rows_for_evaluation(recipe: Recipe, given: Given) -> Problem | None:
    if recipe.data.eval is not None or recipe.train.get("eval_strategy", "no") in _OFF:
        return None
    return Problem(
        "evaluation during training needs held-out rows, and data.eval gives none",
        given.where("train.eval_strategy"),
        got=recipe.train["eval_strategy"],
        fix="data.eval: 0.05",
    )


def _best_model_needs_evaluation(recipe: Recipe, given: Given) -> Problem | None:
    if not recipe.train.get("load_best_model_at_end"):
        return None
    evaluated = recipe.train.get("eval_strategy", "no" if recipe.data.eval is None else "epoch")
    saved = recipe.train.get("save_strategy", "steps")
    if evaluated == saved or saved == "best":
        return None
    return Problem(
        "the best model is only known where evaluation and saving happen together",
        given.where("train.load_best_model_at_end"),
        got=f"eval_strategy {evaluated}, save_strategy {saved}",
        fix=f"train.save_strategy: {evaluated}" if evaluated != "no" else "train.load_best_model_at_end: false",
    )


def _trackers_are_installed(recipe: Recipe, given: Given) -> Problem | None:
    trackers = [recipe.report_to] if isinstance(recipe.report_to, str) else recipe.report_to
    absent = [name for name in trackers if name != "none" and importlib.util.find_spec(name) is None]
    if not absent:
        return None
    fix = 'pip install "finetune-toolkit[track]"' if absent[0] != "trackio" else "pip install trackio"
    return Problem(f"{absent[0]} is not installed", given.where("report_to"), fix=fix)


RULES: tuple[Rule, ...] = (
    _deepspeed_is_installed,
    _deepspeed_offloads,
    _deepspeed_file_exists,
    _streamed_once,
    _model_file_exists,
    _training_data_exist,
    _held_out_data_exist,
    _calibration_data_exist,
    _template_exists,
    _one_precision,
    _held_out_rows_for_evaluation,
    _best_model_needs_evaluation,
    _trackers_are_installed,
)
