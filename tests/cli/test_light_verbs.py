"""The command in a subprocess: verbs that answer at once, exit codes, streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

HEAVY = ("torch", "transformers", "peft", "datasets", "accelerate")
LISTING = f"""
import atexit, runpy, sys
sys.argv[0] = "finetune"
atexit.register(lambda: print("HEAVY", [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr))
runpy.run_module("finetune", run_name="__main__", alter_sys=True)
"""
RECIPE = """\
model: {name_or_path: bundled:smollm2-135m-instruct}
method: s2ft
data: {train: shipped:quickstart/train.jsonl}
output_dir: out
"""


def run(*arguments: str, folder: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", code] if code else ["-m", "finetune"]), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "NO_COLOR": "1"}
    environment.pop("FINETUNE_DEBUG", None)
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=60, check=False)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return "my.yaml"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["train", "-h"],
        ["data", "inspect", "--help"],
        ["select", "--help"],
        ["validate", "select/selectit", "select.scorer=ifd"],
        ["ls"],
        ["ls", "methods"],
        ["ls", "methods", "lora"],
        ["ls", "selectors"],
        ["ls", "selectors", "selectit"],
        ["ls", "templates"],
        ["ls", "tasks", "--json"],
        ["cat", "quickstart"],
        ["cp", "quickstart", "copy.yaml"],
        ["version"],
        ["--version"],
        ["validate", "quickstart", "method=lora"],
        ["validate", "--schema"],
        ["validate", "quickstart", "--explain", "train.optim"],
    ],
    ids=" ".join,
)
def test_light_verbs_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    done = run(*arguments, folder=tmp_path, code=LISTING)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "HEAVY []" in done.stderr


def test_help_is_quick(tmp_path: Path) -> None:
    run("--help", folder=tmp_path)
    started = time.perf_counter()
    run("--help", folder=tmp_path)
    # The budget of the conventions is 0.5 s on a quiet machine; tests share theirs.
    assert time.perf_counter() - started < 1.5


@pytest.mark.parametrize(
    "verb", ["train", "estimate", "select", "validate", "eval", "chat", "merge", "export", "ls", "cp", "cat", "env"]
)
def test_every_verb_shows_two_examples(verb: str, tmp_path: Path) -> None:
    text = run(verb, "--help", folder=tmp_path).stdout
    assert text.count(f"finetune {verb} ") >= 3 - (verb in ("env", "ls"))
    assert "--debug" in text


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["trian"], 2, ["error:", "near train"]),
        (["evla", "x"], 2, ["near eval"]),
        (["train", "quickstrat"], 2, ["near quickstart"]),
        (["train"], 2, ["no recipe", "finetune train quickstart"]),
        (["estimate"], 2, ["no recipe", "finetune estimate quickstart"]),
        (["estimate", "quickstart", "method=lorra"], 2, ["near lora", "argument 1"]),
        (["train", "quickstart", "method=lorra"], 2, ["near lora", "argument 1"]),
        (["train", "quickstart", "train.learning_rat=1"], 2, ["near train.learning_rate"]),
        (["train", "quickstart", "--train.max_steps", "many"], 2, ["got  many", "a whole number"]),
        (["train", "quickstart", "--overwrit"], 2, ["near --overwrite"]),
        (["train", "quickstart", "--nproc", "0"], 2, ["--nproc", "finetune train --help"]),
        (["ls", "--jsn"], 2, ["--json", "finetune ls --help"]),
        (["ls", "method"], 2, ["near methods"]),
        (["ls", "methods", "lorra"], 2, ["near lora"]),
        (["ls", "selectors", "idf"], 2, ["near ifd"]),
        (["ls", "recipes", "lora"], 2, ["not listed by name"]),
        (["select", "select/ifd", "select.scorer=selectt"], 2, ["near selectit", "argument 1"]),
        (["select", "select/ifd", "select.fracton=0.1"], 2, ["near select.fraction"]),
        (["merge"], 2, ["missing", "finetune merge --help"]),
        (["cat", "quickstrat"], 2, ["near quickstart"]),
        (["cp", "quickstart", "my.yaml"], 3, ["my.yaml", "--overwrite"]),
        (["validate", "quickstart", "--explain", "sed"], 2, ["near seed"]),
        (["data", "inspct"], 2, ["finetune data inspct --help"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "error:" not in value else None,
)
def test_wrong_input_is_answered_in_one_form(
    arguments: list[str], code: int, parts: list[str], recipe: str, tmp_path: Path
) -> None:
    done = run(*arguments, folder=tmp_path)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["my.yaml"]


def test_all_problems_are_reported_with_file_and_line(tmp_path: Path) -> None:
    bad = RECIPE + "train:\n  learning_rat: 2e-4\n  bf16: yes\nsed: 3\n"
    (tmp_path / "bad.yaml").write_text(bad, encoding="utf-8")
    done = run("train", "bad.yaml", folder=tmp_path)
    assert done.returncode == 2
    for part in ("bad.yaml:6 ", "bad.yaml:7 ", "bad.yaml:8 ", "3 problems; nothing was started."):
        assert part in done.stderr
    report = json.loads(run("validate", "bad.yaml", "--json", folder=tmp_path).stdout)
    assert not report["valid"]
    assert [problem.get("near") for problem in report["problems"]] == ["train.learning_rate", "true", "seed"]


def test_overrides_of_every_form_reach_the_recipe(recipe: str, tmp_path: Path) -> None:
    forms = ["train.max_steps=012", "--train.learning-rate", "2e-4", "--seed=7", "data.train+=other", "~method"]
    text = run("validate", recipe, *forms, "--resolved", folder=tmp_path).stdout
    for line in ("max_steps: 12", "learning_rate: 0.0002", "seed: 7", "path: other", "name: lora"):
        assert line in text


def test_the_copy_of_a_recipe_is_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    assert run("cp", "lora/quickstart", "recipes", folder=tmp_path).returncode == 0
    copy = (tmp_path / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")
    assert copy == run("cat", "lora/quickstart", folder=tmp_path).stdout
    assert run("validate", "recipes/quickstart.yaml", folder=tmp_path).returncode == 0


def test_json_is_one_document(tmp_path: Path) -> None:
    for arguments in (["ls", "--json"], ["ls", "methods", "--json"], ["ls", "methods", "s2ft", "--json"]):
        assert json.loads(run(*arguments, folder=tmp_path).stdout)
    methods = json.loads(run("ls", "methods", "--json", folder=tmp_path).stdout)
    s2ft = next(method for method in methods if method["name"] == "s2ft")
    assert s2ft["family"] == "selective"
    assert s2ft["paper"].startswith("arXiv")
    assert s2ft["description"]
    assert json.loads(run("version", "--json", folder=tmp_path).stdout)["version"]


def test_the_environment_is_reported(tmp_path: Path) -> None:
    report = json.loads(run("env", "--json", folder=tmp_path).stdout)
    assert report["packages"]["torch"]
    assert report["finetune"]["path"]
    assert "free memory" in report["system"]


def test_warnings_name_the_consequence_and_go_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(RECIPE.replace("s2ft", "{name: s2ft, ratio: 0.1}"), encoding="utf-8")
    done = run("validate", "my.yaml", "method=lora", "--train.learning_rate='2e-4'", folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("valid    lora")
    assert "warning: " in done.stderr
    assert "has no effect" in done.stderr
    assert "warnings" in done.stderr
    assert "2) " in done.stderr


def test_debug_shows_the_traceback_and_no_other_option_does(tmp_path: Path) -> None:
    assert "Traceback" in run("--debug", "cat", "nothing", folder=tmp_path).stderr
    assert "Traceback" not in run("-q", "cat", "nothing", "--no-color", folder=tmp_path).stderr


def test_a_reader_that_has_had_enough_sees_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "finetune", "validate", "--schema"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == ""
    assert process.returncode == 1


INTERRUPTED = """
import signal, sys
from finetune.cli.main import main

def interrupt(event, arguments):
    if event == "open" and str(arguments[0]).endswith("quickstart.yaml"):
        signal.raise_signal(signal.SIGINT)

sys.addaudithook(interrupt)
sys.exit(main(["cat", "quickstart"]))
"""


def test_ctrl_c_ends_without_a_traceback(tmp_path: Path) -> None:
    done = run(folder=tmp_path, code=INTERRUPTED)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == ""
