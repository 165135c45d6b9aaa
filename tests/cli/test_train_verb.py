"""What ``finetune train`` makes of its arguments before it trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.cli.launch import _torchrun_arguments
from finetune.cli.settings import Settings
from finetune.cli.train import with_resume_value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "a.yaml", "--resume"], ["train", "a.yaml", "--resume=last"]),
        (["train", "--resume", "a.yaml"], ["train", "--resume=last", "a.yaml"]),
        (["train", "a.yaml", "--resume", "last", "k=v"], ["train", "a.yaml", "--resume=last", "k=v"]),
        (["train", "a.yaml", "--resume", "out/checkpoint-3"], ["train", "a.yaml", "--resume=out/checkpoint-3"]),
        (["train", "a.yaml", "--resume=x"], ["train", "a.yaml", "--resume=x"]),
    ],
)
def test_resume_needs_no_value(arguments: list[str], expected: list[str]) -> None:
    assert with_resume_value(arguments) == expected


def test_common_options_stand_anywhere_and_the_rest_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FINETUNE_DEBUG", raising=False)
    settings = Settings.read(["-q", "train", "a.yaml", "--debug", "k=v", "--", "--nnodes=2", "-q"])
    assert (settings.quiet, settings.debug, settings.color) == (True, True, True)
    assert settings.arguments == ["train", "a.yaml", "k=v"]
    assert settings.launcher_arguments == ["--nnodes=2", "-q"]


@pytest.mark.parametrize("count", [["--nproc", "2"], ["--nproc=2"]])
def test_several_processes_get_the_same_command_line(count: list[str]) -> None:
    settings = Settings.read(["train", "a.yaml", *count, "k=v", "--resume", "--no-color", "--", "--rdzv-conf=x=1"])
    assert _torchrun_arguments(2, settings, 3) == [
        *("--standalone", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-conf=x=1"),
        *("-m", "finetune", "train", "a.yaml", "k=v", "--resume", "--no-color"),
    ]


@pytest.mark.integration
@pytest.mark.multi_process
@pytest.mark.slow
def test_the_exit_code_of_a_process_is_that_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep", encoding="utf-8")
    arguments = ["train", "quickstart", "output_dir=out", "--nproc", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "finetune", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=180,
        check=False,
    )
    assert done.returncode == 3
    assert "not a run's" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out" / "mine.txt").read_text(encoding="utf-8") == "keep"
