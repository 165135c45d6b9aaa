"""What is wrong with a recipe is said in full: what, where, the nearest key, and what to type."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from finetune.config.aliases import ADVICE, RENAMED
from finetune.config.catalogue import known_keys
from finetune.config.explain import explain
from finetune.config.json_schema import recipe_schema
from finetune.config.load import load_recipe
from finetune.config.method_section import method_configs
from finetune.config.train_section import train_section
from finetune.core.errors import ConfigError, FinetuneWarning, Problem
from finetune.methods import discover

RECIPE = """\
model:
  name_or_path: bundled:smollm2-135m-instruct
method:
  name: s2ft
data:
  train: shipped:quickstart/train.jsonl
output_dir: out
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("recipe.yaml")
    path.write_text(RECIPE, encoding="utf-8")
    return path


def problems_of(path: Path, *overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_recipe([str(path)], overrides)
    return list(caught.value.problems)


def test_problems_of_all_sections_are_reported_in_the_order_of_the_file(recipe: Path) -> None:
    recipe.write_text(
        "model:\n  name_or_path: m\n  dtyp: float32\nmethod:\n  name: s2ft\n  ratoi: 0.1\ndata:\n  packing: yes\n"
        "train:\n  learning_rat: 1\n  warmup_ratio: 0.1\n  num_train_epochs: fast\noutputdir: x\n",
        encoding="utf-8",
    )
    problems = problems_of(recipe)
    assert [(problem.where, problem.near) for problem in problems] == [
        ("recipe.yaml:3  model.dtyp", "model.dtype"),
        ("recipe.yaml:6  method.ratoi", "method.ratio"),
        ("recipe.yaml:7  data", ""),
        ("recipe.yaml:8  data.packing", "true"),
        ("recipe.yaml:10  train.learning_rat", "train.learning_rate"),
        ("recipe.yaml:11  train.warmup_ratio", "train.warmup_steps"),
        ("recipe.yaml:12  train.num_train_epochs", ""),
        ("recipe.yaml:13  outputdir", "output_dir"),
    ]
    assert problems[2].what == "data.train is missing"


@pytest.mark.parametrize(
    ("override", "got", "want", "fix"),
    [
        ("train.bf16=yes", "yes", "true or false", "train.bf16: true"),
        ("train.bf16=1", "1", "true or false", ""),
        ("train.max_steps=1.5", "1.5", "a whole number", ""),
        ("train.max_steps=true", "true", "a whole number", ""),
        ("train.learning_rate=fast", "fast", "a number", ""),
        ("train.learning_rate=-1", "-1", "at least 0", ""),
        ("train.gradient_accumulation_steps=0", "0", "at least 1", ""),
        ("train.debug=3", "3", "text or a list", ""),
        ("method.ratio=0", "0", "more than 0", ""),
        ("method.select=randm", "randm", "random, weight, activation, product, gradient", "method.select: random"),
        ("data.loss_on=asistant", "asistant", "assistant, completion, all, last", "data.loss_on: assistant"),
        ("model.name_or_path=", "null", "text", ""),
        ("model.name_or_path=''", "''", "text that is not empty", ""),
        ("data.train=[]", "[]", "at least one", ""),
        ("train=3", "3", "a mapping", ""),
    ],
)
def test_values_that_do_not_fit(recipe: Path, override: str, got: str, want: str, fix: str) -> None:
    (problem,) = problems_of(recipe, override)
    assert problem.where.startswith("argument 1")
    assert (problem.got, problem.want, problem.fix) == (got, want, fix)


def test_numbers_that_are_meant_are_taken(recipe: Path) -> None:
    with pytest.warns(FinetuneWarning, match=r"train\.learning_rate.*number"):
        loaded = load_recipe(
            [str(recipe)], ["train.learning_rate='2e-4'", "train.max_steps=4.0", "train.warmup_steps=1"]
        )
    values = loaded.recipe.train
    assert values == {"learning_rate": 2e-4, "max_steps": 4, "warmup_steps": 1.0}
    assert isinstance(values["max_steps"], int)
    assert isinstance(values["warmup_steps"], float)


def test_long_lists_of_choices_are_cut(recipe: Path) -> None:
    (problem,) = problems_of(recipe, "train.optim=adamw_torch_fuse")
    assert problem.near == "adamw_torch_fused"
    assert "more; `finetune validate RECIPE --explain train.optim` lists them" in problem.want


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("learning_rate=1", "train.learning_rate"),
        ("packing=true", "data.packing"),
        ("model.max_length=3", "data.max_length"),
        ("model.ratio=3", "method.ratio"),
        ("maxlength=3", "data.max_length"),
        ("train.sed=1", "seed"),
    ],
)
def test_a_key_in_the_wrong_place_is_answered_with_the_right_one(recipe: Path, override: str, near: str) -> None:
    (problem,) = problems_of(recipe, override)
    assert problem.near == near


def test_an_unknown_method_is_answered_with_the_nearest(recipe: Path) -> None:
    (problem,) = problems_of(recipe, "method=lorra")
    assert (problem.near, problem.where) == ("lora", "argument 1  method.name")
    assert "finetune ls methods" in problem.want


@pytest.mark.parametrize("key", sorted({*RENAMED, *ADVICE}))
def test_foreign_keys_are_answered_with_ours(recipe: Path, key: str) -> None:
    (problem,) = problems_of(recipe, f"{key}=0.25")
    assert problem.fix
    if key in RENAMED:
        assert problem.near == RENAMED[key]
        assert problem.fix.startswith(f"{RENAMED[key]}: 0.25")


def test_what_foreign_keys_are_renamed_to_exists() -> None:
    keys = known_keys(method_configs([{"name": "lora"}]))
    assert set(RENAMED.values()) <= set(keys)


def test_training_arguments_are_those_of_the_installed_transformers() -> None:
    from transformers import TrainingArguments

    ours = train_section().model_fields
    theirs = TrainingArguments.__dataclass_fields__
    assert set(ours) <= set(theirs)
    elsewhere = {key.removeprefix("train.") for key in {*RENAMED, *ADVICE} if key.startswith("train.")}
    assert set(theirs) - set(ours) <= elsewhere
    values = {"optim": "adamw_torch", "lr_scheduler_type": "cosine", "save_strategy": "best", "eval_strategy": "no"}
    assert train_section().model_validate(values)


@pytest.mark.parametrize(
    ("overrides", "where", "word"),
    [
        (["data.train=rows.jsonl"], "data.train", "no file"),
        (["data.train=[shipped:quickstart/train.jsonl, rows.csv]"], "data.train.1.path", "no file"),
        (["data.train=shipped:quickstart/trian.jsonl"], "data.train.0.path", "ships no file"),
        (["data.eval=rows.parquet"], "data.eval", "no file"),
        (["data.calibration=rows.parquet"], "data.calibration", "no file"),
        (["data.chat_template=mine.jinja"], "data.chat_template", "no file"),
        (["model.name_or_path=./model"], "model.name_or_path", "no file"),
        (["model.name_or_path=model.gguf"], "model.name_or_path", "no file"),
        (["engine.strategy=deepspeed", "report_to=[]"], "engine.strategy", "not installed"),
        (["engine.offload.optimizer=cpu"], "engine.offload.optimizer", "only deepspeed"),
        (["engine.deepspeed.config=zero.json"], "engine.deepspeed.config", "no file"),
        (["train.fp16=true", "train.bf16=true"], "train.fp16", "exclude"),
        (["train.eval_strategy=steps"], "train.eval_strategy", "held-out"),
        (["data.eval=0.1", "train.load_best_model_at_end=true"], "train.load_best_model_at_end", "best model"),
        (["report_to=[none, tensorboard]"], "report_to", "not installed"),
    ],
)
def test_rules_between_keys(
    recipe: Path, overrides: list[str], where: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    absent = {"tensorboard", "deepspeed"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name))
    (problem,) = problems_of(recipe, *overrides)
    assert word in problem.what
    assert problem.where.partition("  ")[2].startswith(where.partition(".0")[0])


def test_deepspeed_keeps_weights_elsewhere_at_stage_3(recipe: Path) -> None:
    def keys(weights: str, stage: int) -> list[str]:
        return ["engine.strategy=deepspeed", f"engine.deepspeed.stage={stage}", f"engine.offload.weights={weights}"]

    for weights, stage in (("cpu", 2), ("disk", 3)):
        (problem,) = problems_of(recipe, *keys(weights, stage))
        assert problem.fix == "engine.offload.weights: cpu with engine.deepspeed.stage: 3"
    for weights, stage in (("cpu", 3), ("none", 1)):
        load_recipe([str(recipe)], keys(weights, stage))


def test_broken_rules_are_reported_together_and_a_near_file_is_named(recipe: Path) -> None:
    Path("rows.jsonl").write_text("{}", encoding="utf-8")
    problems = problems_of(recipe, "data.train=row.jsonl", "engine.offload.optimizer=cpu")
    assert len(problems) == 2
    assert "rows.jsonl" in [problem.near for problem in problems]


def test_a_key_is_explained_with_its_origin_and_meaning(recipe: Path) -> None:
    loaded = load_recipe([str(recipe)], ["train.learning_rate=1e-3"])
    rate = explain(loaded, "train.learning_rate")
    assert (rate["value"], rate["origin"], rate["type"]) == (1e-3, "argument 1", "number")
    assert rate["help"]
    assert explain(loaded, "model.name_or_path")["origin"] == "recipe.yaml:2"
    assert explain(loaded, "train.weight_decay")["value"] == 0.0
    assert explain(loaded, "method.ratio")["origin"] == "default"
    assert explain(loaded, "method.ratio")["value"] == discover().get("s2ft").Config().ratio  # type: ignore[attr-defined]
    assert explain(loaded, "data.train.0.path")["value"] == "shipped:quickstart/train.jsonl"
    with pytest.raises(ConfigError) as caught:
        explain(loaded, "train.learning_rat")
    assert caught.value.near == "train.learning_rate"


def test_every_key_says_what_it_means() -> None:
    own = [key for key in known_keys().values() if not key.name.startswith("train.")]
    assert [key.name for key in own if not key.help] == []


def test_the_json_schema_accepts_the_recipes_and_nothing_else() -> None:
    schema = recipe_schema()
    assert schema["additionalProperties"] is False
    assert {"model", "data", "output_dir"} <= set(schema["required"])
    arguments = schema["$defs"]["TrainSection"]["properties"]
    assert "learning_rate" in arguments
    assert "output_dir" not in arguments
    assert schema["$defs"]["method.s2ft"]["properties"]["name"] == {"const": "s2ft"}
    references = set(_references(schema))
    assert {reference.removeprefix("#/$defs/") for reference in references} <= set(schema["$defs"])


def _references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in _references(value)]
    return [found for value in node for found in _references(value)] if isinstance(node, list) else []


@pytest.mark.parametrize("name", list(discover()))
def test_the_resolved_recipe_of_every_method_is_read_back(recipe: Path, name: str) -> None:
    first = load_recipe([str(recipe)], [f"method={name}"])
    Path("resolved.yaml").write_text(first.resolved_yaml(), encoding="utf-8")
    second = load_recipe(["resolved.yaml"])
    assert second.resolved()["method"] == first.resolved()["method"]
    assert second.recipe.method["name"] == name  # type: ignore[call-overload]
