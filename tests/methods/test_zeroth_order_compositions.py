"""``[mask or adapter, mezo]``: what moves, by which slope, what is saved, and what is refused with which reason."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import finetune
from finetune.core.errors import CapabilityError, CheckpointError
from finetune.export.run import export_run
from finetune.methods import build_method
from finetune.methods.primitives.dense_directions import direction_numbers
from finetune.methods.primitives.hash_noise import derive_key, hash_tile, noise_of_hash, row_vectors
from support.tiny import tiny_llama, token_batch

IDS = token_batch(4, 12)
BATCHES = [{"input_ids": IDS, "labels": IDS}]
MASKS: dict[str, dict[str, Any]] = {
    "random": {"budget": 0.05},
    "magnitude": {"budget": 0.05},
    "fish": {"budget": 0.05, "calibration": 4},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"r": 2},
    "mos": {"r": 3, "equiv_rank": 2, "private_rank": 1},
    "pure_sharing": {},
    "prolora": {},
    "mosa": {},
}
EARLIER = {**MASKS, **ADAPTERS}


def attached(*sections: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(0)
    method = build_method(list(sections))
    calibration = BATCHES if method.calibration_examples(4) else None
    return method, method.attach(tiny_llama(dtype=dtype), calibration=calibration)


def train(method: Any, model: Any, count: int = 5, *, decay: float = 0.0) -> None:
    optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=1e-3, weight_decay=decay)
    for step in range(count):
        ids = token_batch(4, 12, seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def field(key: int, tensor: Tensor) -> Tensor:
    flat = tensor.view(1, -1) if tensor.ndim < 2 else tensor.view(-1, tensor.shape[-1])
    a, b = row_vectors(key, 0, len(flat), torch.device("cpu"))
    columns = torch.arange(flat.shape[1], dtype=torch.int32)
    return noise_of_hash(hash_tile(a, b, columns), "rademacher").view_as(tensor)


@pytest.mark.parametrize("name", EARLIER)
def test_the_slope_is_along_what_the_earlier_method_trains(name: str) -> None:
    method, model = attached({"name": name, **EARLIER[name]}, {"name": "mezo", "eps": 1e-3})
    model(input_ids=IDS, labels=IDS).loss.backward()
    found = float(model.projected_gradient.grad)

    plain, reference = attached({"name": name, **EARLIER[name]})
    parameters = plain.trained_parameters()
    assert sum(p.numel() for p in parameters.values()) == method.summary().trained
    numbers = direction_numbers(list(parameters))
    losses = []
    for scale in (1e-3, -1e-3):
        optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
        for key, parameter in parameters.items():
            parameter.grad = -scale * field(derive_key(0, 0, 0, numbers[key]), parameter)
        optimizer.step()  # which writes them where the forward pass reads them
        losses.append(reference.eval()(input_ids=IDS, labels=IDS).loss.item())
        for key, parameter in parameters.items():
            parameter.grad = scale * field(derive_key(0, 0, 0, numbers[key]), parameter)
        optimizer.step()
    # Both sides are rounded to float32 near 6, by 2.4e-7 each.
    assert found == pytest.approx((losses[0] - losses[1]) / 2e-3, abs=1e-3)
    assert found != 0.0


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_outside_a_mask_keep_their_bits_under_weight_decay(name: str, dtype: torch.dtype) -> None:
    method, model = attached({"name": name, **MASKS[name]}, {"name": "mezo", "eps": 1e-2}, dtype=dtype)
    base = dict(tiny_llama(dtype=dtype).named_parameters())
    train(method, model, 20, decay=0.5)
    chosen = {key: t for key, t in method.state_dict().items() if key.endswith(".index")}
    moved = 0
    for key, weight in method.merge().named_parameters():
        changed = (weight != base[key]).flatten().nonzero().flatten()
        inside = chosen.get(f"{name}/{key}.index", torch.empty(0, dtype=torch.int32)).long()
        assert torch.isin(changed, inside).all(), key
        moved += changed.numel()
    assert moved > 0.5 * sum(index.numel() for index in chosen.values()) or dtype == torch.bfloat16
    assert moved > 0


@pytest.mark.parametrize("name", EARLIER)
def test_steps_of_no_length_leave_every_bit(name: str) -> None:
    method, model = attached({"name": name, **EARLIER[name]}, {"name": "mezo", "eps": 1e-2}, dtype=torch.bfloat16)
    with torch.no_grad():
        before = model.eval()(input_ids=IDS).logits
    optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=0.0)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=IDS).logits, before)


@pytest.mark.parametrize("name", EARLIER)
def test_saved_loaded_and_gone_on_with(name: str, tmp_path: Path) -> None:
    sections = ({"name": name, **EARLIER[name]}, {"name": "mezo", "eps": 1e-2, "queries": 2})
    method, model = attached(*sections)
    train(method, model)
    method.save(tmp_path)
    with torch.no_grad():
        expected = model.eval()(input_ids=IDS).logits
        loaded = finetune.load(tiny_llama(), tmp_path)
        assert torch.equal(loaded(input_ids=IDS).logits, expected)
    resumed, again = attached(*sections)
    resumed.load(tmp_path)
    train(method, model, 3)
    train(resumed, again, 3)
    found = resumed.state_dict()
    assert all(torch.equal(found[key], tensor) for key, tensor in method.state_dict().items())
    assert len(found["mezo/training/distances"]) == 8
    with pytest.raises(CapabilityError, match=f"what {name} added or chose"):
        export_run(tmp_path, tmp_path / "log", "zo-log")


def test_a_masks_state_belongs_to_what_trained_it(tmp_path: Path) -> None:
    method, _ = attached({"name": "random", **MASKS["random"]}, {"name": "mezo"})
    method.save(tmp_path)
    for others in ([], [{"name": "mezo", "seed": 1}]):
        with pytest.raises(CheckpointError, match="another followers"):
            attached({"name": "random", **MASKS["random"]}, *others)[0].load(tmp_path)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (["id3", "mezo"], "id3 goes on choosing entries by their gradients, and mezo has none"),
        (["spiel", "mezo"], "spiel goes on choosing entries by their gradients, and mezo has none"),
        (["s2ft", "mezo"], "s2ft leaves none of them trainable"),
        (["lisa", "mezo"], "so that none would take turns"),
        (["random", "lozo"], "random leaves none of them trainable"),
        (["magnitude", "sparse_mezo"], "magnitude leaves none of them trainable"),
    ],
)
def test_orders_that_are_refused(order: list[str], reason: str) -> None:
    with pytest.raises(CapabilityError, match=reason):
        build_method([{"name": name} for name in order])


def test_spectrum_narrows_to_its_tensors() -> None:
    base = copy.deepcopy(tiny_llama())
    method, model = attached({"name": "spectrum", "top_percent": 50}, {"name": "mezo"})
    names = set(method.learned_tensors())
    train(method, model)
    for key, weight in method.merge().named_parameters():
        assert torch.equal(weight, base.get_parameter(key)) == (key not in names), key
