"""Shipped recipes are readable, each says what it is, and the files they name are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from finetune.config.schema import name_scorer
from finetune.core.shipped import shipped_names, shipped_path
from finetune.data_selection import build_scorer
from finetune.evaluation.tasks import read_task
from finetune.methods.registry import discover
from finetune.methods.selected_entries import SelectedEntries

RECIPES = shipped_names("recipe")


def _read(name: str) -> dict[str, Any]:
    content = YAML(typ="safe", pure=True).load(shipped_path(f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("name", RECIPES)
def test_the_first_line_says_what_the_recipe_does(name: str) -> None:
    first = shipped_path(f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")


@pytest.mark.parametrize("name", RECIPES)
def test_methods_tasks_and_shipped_files_of_a_recipe_exist(name: str) -> None:
    recipe = _read(name)
    if "select" in recipe:
        build_scorer(name_scorer(recipe["select"]["scorer"]))
    methods = recipe.get("method", [])
    for entry in methods if isinstance(methods, list) else [methods]:
        method = dict(entry)
        assert discover().get(method.pop("name")).Config.model_validate(method)
    for task in recipe.get("eval", {}).get("tasks", []):
        read_task(task)
    for task in recipe.get("search", {}).get("versatility", []):
        assert Path(read_task(task).data).is_file()
    for key in ("train", "calibration"):
        given = recipe["data"].get(key, [])
        for source in given if isinstance(given, list) else [given]:
            path = source if isinstance(source, str) else source["path"]
            if path.startswith("shipped:"):
                assert shipped_path(path).is_file()


def test_a_recipe_trains_selects_or_reflects() -> None:
    for name in RECIPES:
        assert sum(section in _read(name) for section in ("method", "select", "reflect")) == 1, name


def test_there_is_a_recipe_for_each_method_that_the_quickstart_compares() -> None:
    methods = {"full", "top_layers", "lora", "dora", "vera", "ia3", "shira", "s2ft"}
    methods |= {name for name in discover() if issubclass(discover().get(name), SelectedEntries)}
    methods |= {name for name in discover() if discover().get(name).family == "freezing"}
    assert {f"{method}/quickstart" for method in methods} <= set(RECIPES)
    assert all(_read(f"{method}/quickstart")["method"]["name"] == method for method in methods)


def test_recipes_of_the_quickstart_differ_in_method_and_rate_only() -> None:
    def rest(name: str) -> dict[str, Any]:
        recipe = _read(name)
        del recipe["method"], recipe["output_dir"], recipe["train"]["learning_rate"]
        recipe["data"].pop("calibration", None)
        return recipe

    for name in RECIPES:
        if name.endswith("/quickstart"):
            assert rest(name) == rest("lora/quickstart")


def test_output_folders_are_distinct() -> None:
    folders = [_read(name)["output_dir"] for name in RECIPES]
    assert len(set(folders)) == len(folders)
