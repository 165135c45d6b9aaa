"""Shipped files are found wherever the package is installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from finetune.core.errors import ConfigError
from finetune.core.shipped import resolve_data_path, shipped_names, shipped_path


def test_shipped_path_finds_files_with_and_without_the_prefix() -> None:
    path = shipped_path("shipped:quickstart/train.jsonl")
    assert path == shipped_path("quickstart/train.jsonl")
    assert path.is_file()


@pytest.mark.parametrize("name", ["quickstart/trian.jsonl", "shipped:quickstart/trian.jsonl"])
def test_an_unknown_file_is_answered_with_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shipped_path(name)
    assert caught.value.near == "quickstart/train.jsonl"


def test_nothing_outside_the_recipes_is_shipped() -> None:
    with pytest.raises(ConfigError):
        shipped_path("../methods/base.py")


def test_tasks_and_recipes_are_told_apart() -> None:
    assert shipped_names("task") == ["cron"]
    assert {"quickstart", "lora/quickstart"} <= set(shipped_names("recipe"))
    assert not any("cron" in name for name in shipped_names("recipe"))


def test_data_paths_are_relative_to_the_folder_but_hub_names_are_not(tmp_path: Path) -> None:
    assert resolve_data_path("rows.jsonl", tmp_path) == str(tmp_path / "rows.jsonl")
    assert resolve_data_path("owner/name", tmp_path) == "owner/name"
    assert resolve_data_path("rows.jsonl") == "rows.jsonl"
    assert resolve_data_path("shipped:quickstart/test.jsonl", tmp_path) == str(shipped_path("quickstart/test.jsonl"))


def test_files_in_a_zip_archive_are_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("core/__init__.py", "core/errors.py", "core/shipped.py"):
            source = sys.modules["finetune.core.shipped"].__file__
            assert source is not None
            file.write(Path(source).parent.parent / name, f"finetune/{name}")
        file.writestr("finetune/__init__.py", "")
        file.writestr("finetune/recipes/__init__.py", "")
        file.writestr("finetune/recipes/quickstart/train.jsonl", "rows\n")
    code = "from finetune.core.shipped import shipped_path as p; print(p('quickstart/train.jsonl').read_text())"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(archive)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "rows"
