"""Activations that wait elsewhere: the same gradients bit for bit, weights left alone, storages put away once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import finetune
from finetune.offload.activations import OffloadedActivations
from finetune.offload.spill import SpillFile
from support.tiny import tiny_llama, token_batch


def gradients(model: Any, away: OffloadedActivations | None, *, passes: int = 1) -> dict[str, torch.Tensor]:
    model.zero_grad()
    losses = []
    for seed in range(passes):
        ids = token_batch(8, 64, seed=seed)
        if away is None:
            losses.append(model(input_ids=ids, labels=ids).loss)
        else:
            with away.forward():
                losses.append(model(input_ids=ids, labels=ids).loss)
    for loss in losses:
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("place", ["disk", "cpu"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["lora", "s2ft", "full"])
def test_gradients_are_the_same_bit_for_bit(
    tmp_path: Path, method: str, checkpointing: bool, place: Literal["disk", "cpu"]
) -> None:
    model = finetune.method(method).attach(tiny_llama())
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    away = OffloadedActivations(model, place, tmp_path)
    for passes in (1, 2):  # two graphs at a time: nothing of the first may be overwritten
        expected, found = gradients(model, None, passes=passes), gradients(model, away, passes=passes)
        assert expected
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert away.bytes_away > 0
    away.close()


def test_a_storage_is_put_away_once_and_a_weight_never(tmp_path: Path) -> None:
    linear = nn.Linear(256, 256, bias=False)
    x = torch.randn(128, 256, requires_grad=True)
    away = OffloadedActivations(linear, "disk", tmp_path)
    with away.forward():
        y = x * 1.0
        loss = (linear(y) * y.t().reshape(128, 256) * torch.exp(y)).sum()
    # What is kept: y and its views, linear's output and what it is multiplied with, exp(y) and the product before it.
    assert away.bytes_away == 5 * x.numel() * 4
    (found,) = torch.autograd.grad(loss, x)
    y = x * 1.0
    (expected,) = torch.autograd.grad((linear(y) * y.t().reshape(128, 256) * torch.exp(y)).sum(), x)
    assert torch.equal(found, expected)


def test_a_graph_may_be_walked_twice(tmp_path: Path) -> None:
    x = torch.randn(256, 256, requires_grad=True)
    with OffloadedActivations(nn.Identity(), "disk", tmp_path).forward():
        loss = (x.exp() ** 2).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, x)[0], first)


def test_what_changes_after_it_was_put_away_is_put_away_anew(tmp_path: Path) -> None:
    away = OffloadedActivations(nn.Identity(), "disk", tmp_path)
    x = torch.randn(256, 256, requires_grad=True)
    with away.forward():
        y = x.exp()
        assert away._file is not None
        away._file._worker.submit(lambda: None).result()  # y is written
        y.add_(1)
        loss = (y * y).sum()
    (found,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found, 2 * (x.exp() + 1) * x.exp())


def test_what_changes_while_it_is_written_is_an_error_and_no_wrong_gradient(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    block = torch.ones(1 << 20)
    slow = [file.put(torch.ones(1 << 22)) for _ in range(3)]  # the writer is busy
    changed = file.put(block)
    block.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        changed.fetch()
    assert slow[0].fetch().nbytes() == 4 << 22
    file.close()


_PEAK = """
import sys, torch
from pathlib import Path
from torch import nn
from finetune.offload.activations import OffloadedActivations
from finetune.planning.host import resident_bytes
layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(24)])
away = OffloadedActivations(layers, "disk", Path(sys.argv[2]))
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
before = peak()
x = torch.randn(1 << 15, 64)
if sys.argv[1] == "disk":
    with away.forward():
        loss = layers(x).sum()
else:
    loss = layers(x).sum()
loss.backward()
print(peak() - before)
"""


def test_the_peak_is_lower_by_what_is_away(tmp_path: Path) -> None:
    def peak(place: str) -> int:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, "-c", _PEAK, place, str(tmp_path)]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    kept = 24 * 2 * (1 << 15) * 64 * 4  # the inputs of each layer and of each GELU
    saved = peak("none") - peak("disk")
    assert saved > kept - (64 << 20) - 6 * (1 << 15) * 64 * 4  # but for what is on its way
