"""The three ways to the package: the checkout with its links, and what an installation contains."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import finetune
import finetune.methods

ROOT = Path(__file__).resolve().parents[2]
MAPPED = ("methods", "data_selection", "recipes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy of the checkout that has no links, as on a system without them."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in MAPPED:
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    shutil.copytree(ROOT / "finetune", copy / "finetune", ignore=shutil.ignore_patterns("__pycache__", *MAPPED))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([*command, str(copy)], check=True, capture_output=True, text=True)
    (built,) = out.glob("*.whl")
    return built


def tracked_files(*suffixes: str) -> set[str]:
    """Returns the files of the package as they are called after installation."""
    found = set()
    for folder, prefix in [("finetune", "finetune"), *((name, f"finetune/{name}") for name in MAPPED)]:
        for path in (ROOT / folder).rglob("*"):
            behind_link = folder == "finetune" and path.relative_to(ROOT / folder).parts[0] in MAPPED
            if path.is_file() and path.suffix in suffixes and not behind_link:
                found.add(f"{prefix}/{path.relative_to(ROOT / folder).as_posix()}")
    return found


def test_checkout_is_one_tree() -> None:
    assert Path(finetune.__file__).resolve().parent == ROOT / "finetune"
    assert Path(finetune.methods.__file__).resolve().parent == ROOT / "methods"
    for folder in MAPPED:
        assert (ROOT / "finetune" / folder).readlink() == Path("..") / folder


def test_wheel_has_every_module_and_data_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = tracked_files(".py", ".yaml", ".jsonl", ".jinja", ".css", ".typed") - names
    assert not missing
    assert "finetune/py.typed" in names
    assert not [name for name in names if name.split("/")[0] in (*MAPPED, "tests")]


def test_wheel_names_the_command_and_the_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        assert info.startswith("finetune_toolkit-")
        assert "finetune = finetune.cli.main:main" in archive.read(f"{info}/entry_points.txt").decode()
        assert "License-Expression: Apache-2.0" in archive.read(f"{info}/METADATA").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()


def test_installed_wheel_imports_without_links(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "methods.py").write_text("raise SystemExit('the user\\'s own methods.py was imported')\n")
    code = (
        "import finetune.methods, finetune.recipes, finetune.data_selection, pathlib;"
        "print(pathlib.Path(finetune.methods.__file__).parent.relative_to(pathlib.Path('site').resolve()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == Path("finetune/methods")


@pytest.mark.parametrize("folder", MAPPED)
def test_bare_import_is_refused(folder: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"finetune.{folder}" in done.stderr


def test_every_folder_with_modules_is_a_package() -> None:
    # find_packages passes over a folder without __init__.py, and an installation would lack it.
    for name in tracked_files(".py"):
        source = name.removeprefix("finetune/") if name.split("/")[1] in MAPPED else name
        assert (ROOT / source).parent.joinpath("__init__.py").is_file(), source
