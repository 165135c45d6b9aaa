"""Checkpoint folders: complete or passed over, rotated, and tied to their run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune.core.errors import CheckpointError, RefusedError
from finetune.training.checkpoint import (
    check_identity,
    complete_checkpoint,
    list_checkpoints,
    newest_complete,
    rotate,
    verify_tensors,
)
from finetune.training.output_folder import check_disk, check_output, checkpoint_to_resume

IDENTITY = {"method": "lora", "seed": 1}


def make(run: Path, step: int) -> Path:
    staged = run / ".saving" / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    save_file({"w": torch.full((4,), float(step))}, staged / "delta.safetensors")
    return complete_checkpoint(staged, run, IDENTITY)


def test_the_newest_complete_checkpoint_wins_and_the_damaged_are_named(tmp_path: Path) -> None:
    for step in (5, 10, 100):
        make(tmp_path, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-5", "checkpoint-10", "checkpoint-100"]
    file = tmp_path / "checkpoint-100" / "delta.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "checkpoint-200").mkdir()
    newest, skipped = newest_complete(tmp_path)
    assert newest == tmp_path / "checkpoint-10"
    assert list(skipped) == [tmp_path / "checkpoint-200", tmp_path / "checkpoint-100"]
    assert skipped[tmp_path / "checkpoint-200"] == "manifest.json is missing"
    assert skipped[tmp_path / "checkpoint-100"].startswith("delta.safetensors has ")
    flipped = bytearray((tmp_path / "checkpoint-10" / "delta.safetensors").read_bytes())
    flipped[-1] ^= 1
    (tmp_path / "checkpoint-10" / "delta.safetensors").write_bytes(flipped)
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoint-5"


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    rotate(tmp_path, keep=2, best=str(tmp_path / "checkpoint-1"))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    rotate(tmp_path, keep=None, best=None)
    assert len(list_checkpoints(tmp_path)) == 3


def test_another_run_is_refused_field_by_field(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, 1)
    check_identity(checkpoint, IDENTITY)
    with pytest.raises(CheckpointError) as caught:
        check_identity(checkpoint, {"method": "s2ft", "seed": 2})
    assert [(p.got, p.want) for p in caught.value.problems] == [("s2ft", "lora"), ("2", "1")]


@pytest.mark.parametrize("tensor", [torch.tensor([1.0, float("nan")]), torch.zeros(0)])
def test_an_empty_or_non_finite_tensor_is_found(tmp_path: Path, tensor: torch.Tensor) -> None:
    save_file({"w": tensor}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="empty or non-finite"):
        verify_tensors(tmp_path, at_least=0)


def test_a_checkpoint_with_less_than_was_trained_is_found(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors")
    verify_tensors(tmp_path, at_least=3)
    with pytest.raises(CheckpointError, match="less than what was trained"):
        verify_tensors(tmp_path, at_least=4)


def test_what_to_resume(tmp_path: Path) -> None:
    assert checkpoint_to_resume(tmp_path, None) is None
    with pytest.raises(CheckpointError, match="no run to resume"):
        checkpoint_to_resume(tmp_path, "last")
    (tmp_path / "run.json").write_text("{}")
    assert checkpoint_to_resume(tmp_path, "last") is None  # killed before its first checkpoint: from the start
    checkpoint = make(tmp_path, 3)
    assert checkpoint_to_resume(tmp_path, "last") == checkpoint
    (tmp_path / "checkpoint-9").mkdir()
    with pytest.warns(UserWarning, match="checkpoint-9 is not complete"):
        assert checkpoint_to_resume(tmp_path, "last") == checkpoint
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint_to_resume(tmp_path, str(tmp_path / "checkpoint-9"))


def test_an_output_directory_is_never_taken_by_surprise(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "run", resume=False, overwrite=False)
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(RefusedError, match="not a run's"):
            check_output(tmp_path, resume=False, overwrite=overwrite)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RefusedError) as caught:
        check_output(tmp_path, resume=False, overwrite=False)
    assert "--overwrite" in caught.value.fix
    check_output(tmp_path, resume=False, overwrite=True)
    check_output(tmp_path, resume=True, overwrite=False)
    with pytest.raises(RefusedError, match="is a file"):
        check_output(tmp_path / "notes.txt", resume=False, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_disk_that_is_too_small_is_said_before_the_first_step(tmp_path: Path) -> None:
    check_disk(tmp_path, checkpoint_bytes=1000, checkpoints=2)
    with pytest.raises(RefusedError, match="not enough disk"):
        check_disk(tmp_path, checkpoint_bytes=10**15, checkpoints=2)
