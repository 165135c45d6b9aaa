"""What the machine has left, read from where the system says it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from finetune.planning.host import _container_room, available_memory, free_disk, peak_resident_bytes, resident_bytes


def test_memory_is_of_a_sane_size() -> None:
    assert 0 < resident_bytes() <= peak_resident_bytes()
    assert 2**20 < available_memory() < 2**50


def test_peak_stays_after_memory_is_given_back() -> None:
    code = (
        "from finetune.planning.host import peak_resident_bytes, resident_bytes\n"
        "before = peak_resident_bytes()\n"
        "block = bytearray(200_000_000); del block\n"
        "print(peak_resident_bytes() - before, resident_bytes() - before)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    peak, now = map(int, done.stdout.split())
    assert peak > 190_000_000
    assert now < 100_000_000


def test_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "a" / "b") == pytest.approx(free_disk(tmp_path), rel=0.05)


def test_smallest_limit_over_a_group_counts(tmp_path: Path) -> None:
    inner = tmp_path / "service" / "job"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("700\n")
    (inner.parent / "memory.max").write_text("1000\n")
    (inner.parent / "memory.current").write_text("900\n")
    (inner.parent / "memory.stat").write_text("anon 500\ninactive_file 250\nactive_file 50\n")
    assert _container_room(tmp_path, "service/job") == [400]


def test_no_limit_is_no_room_told(tmp_path: Path) -> None:
    assert _container_room(tmp_path, "gone/away") == []
