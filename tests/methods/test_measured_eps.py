"""The distance of the measurements: chosen by ``eps: auto``, and compared with the rounding of the loss."""

from __future__ import annotations

import logging
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.core.errors import ConfigError, FinetuneWarning
from finetune.methods.primitives.measured_eps import CANDIDATES, choose_eps, slope_noise
from support.tiny import tiny_llama, token_batch

IDS = token_batch(4, 12)


def started(name: str = "mezo", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """Returns a method whose model has made one estimate."""
    method = finetune.method(name, **config)
    method.attach(tiny_llama(dtype=dtype))(input_ids=IDS, labels=IDS)
    return method


def test_the_smallest_distance_beyond_rounding_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    # Slopes of 10 along two directions. Rounding of 6e-3 / eps: 20, 6, 2, 0.6, ... with alternating signs.
    noise = torch.tensor([[6e-3 / eps, -6e-3 / eps] for eps in CANDIDATES], dtype=torch.float64)
    sign = torch.tensor([1.0, -1, 1, -1, 1, -1], dtype=torch.float64)[:, None]
    with caplog.at_level(logging.INFO, "finetune"):
        # Changes: 26, 8, 2.6, 0.8, ...; 30 % of the slopes is 3.
        assert choose_eps(10 + sign * noise) == 3e-3
    chosen = [line for line in caplog.text.splitlines() if "<- chosen" in line]
    assert len(chosen) == 1
    assert chosen[0].split()[0] == "0.003"


def test_where_none_is_good_the_least_bad_is_taken_with_a_word() -> None:
    slopes = torch.tensor([[1.0], [-1], [1], [-1], [-0.5], [1]], dtype=torch.float64)
    with pytest.warns(FinetuneWarning, match="no eps gives slopes"):
        assert choose_eps(slopes) == 1e-2


def test_noise_of_a_slope_is_told_from_curvature() -> None:
    generator = torch.Generator().manual_seed(0)
    at = torch.tensor([0.9, 1.0, 1.1], dtype=torch.float64)[:, None]
    curved = 5 + 0.5 * at.square() + torch.zeros(3, 4000, dtype=torch.float64)
    noise = torch.randn(3, 4000, generator=generator, dtype=torch.float64) / at
    found, size = slope_noise(curved + 0.3 * noise)
    # The second difference of the curvature is 0.5 * 0.02 / 2.46 = 0.004.
    assert found == pytest.approx(0.3, rel=0.03)
    assert size == pytest.approx(math.hypot(5.5, 0.3), rel=0.01)


@pytest.mark.parametrize("name", ["mezo", "lozo"])
def test_auto_goes_by_the_dtype_of_the_forward_pass(name: str) -> None:
    assert started(name, eps="auto")._measurement.eps <= 1e-3
    assert 1e-3 <= started(name, torch.bfloat16, eps="auto")._measurement.eps <= 1e-1


@pytest.mark.parametrize("name", ["mezo", "lozo", "fzoo"])
def test_below_the_noise_floor_the_noise_is_measured_and_said(name: str) -> None:
    with pytest.warns(FinetuneWarning, match=r"eps 1e-05 is below the noise floor.* moves a slope by \d"):
        started(name, torch.bfloat16, eps=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        started(name, torch.bfloat16, eps=1e-2)
        started(name, eps=1e-3)


@pytest.mark.parametrize("name", ["mezo", "lozo"])
def test_measuring_moves_nothing_and_takes_no_direction_of_a_step(name: str) -> None:
    measured, told = started(name, eps="auto"), finetune.method(name, eps=3e-4)
    told.attach(tiny_llama())(input_ids=IDS, labels=IDS)
    slopes = []
    for method in (measured, told):
        method.model(input_ids=IDS, labels=IDS).loss.backward()
        slopes.append(method.model.projected_gradient.grad)
    assert measured._measurement.eps == 3e-4
    assert torch.equal(slopes[0], slopes[1])
    before = dict(told.learned_tensors())
    assert all(torch.equal(tensor, before[key]) for key, tensor in measured.learned_tensors().items())


def test_what_was_chosen_belongs_to_the_learned_state(tmp_path: Path) -> None:
    method = started(eps="auto", dtype=torch.bfloat16)
    torch.optim.SGD(method.trained_parameters().values(), lr=0.0).step()
    method.load_state_dict({**method.state_dict(), "training/eps": torch.tensor(0.02, dtype=torch.float64)})
    method.save(tmp_path)
    resumed = finetune.method("mezo", eps="auto")
    model = resumed.attach(tiny_llama(dtype=torch.bfloat16))
    resumed.load(tmp_path)
    model(input_ids=IDS, labels=IDS)
    assert resumed._measurement.eps == 0.02


@pytest.mark.parametrize("eps", [0.0, -1e-3, "automatic"])
def test_an_eps_that_is_none(eps: Any) -> None:
    with pytest.raises(ConfigError, match="eps"):
        finetune.method("mezo", eps=eps)
