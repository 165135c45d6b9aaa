"""What every registered method keeps, whoever wrote it (design section 8)."""

from __future__ import annotations

import copy
import gc
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import GradientState

import finetune
from finetune.core.errors import CapabilityError, CheckpointError
from finetune.methods import METHODS, Method, discover
from finetune.methods.estimator import Estimator
from finetune.methods.scheduled_tensors import ScheduledTensors
from support.conformance_cases import BATCH_DEPENDENT, CASES, CROPPED, UNPICKLABLE, base_model, make
from support.tiny import token_batch

INPUTS = token_batch(4, 16)
PROBE = token_batch(2, 9, seed=7)


def attached(name: str, *, seed: int = 3, **options: Any) -> tuple[Method, Any, Any]:
    """Returns the attached method, the model to train, and an untouched copy of the base."""
    base = base_model(name, **options)
    method = make(name)
    torch.manual_seed(seed)
    model = method.attach(copy.deepcopy(base), calibration=[{"input_ids": INPUTS, "labels": INPUTS}])
    method.bind(total_steps=10)
    return method, model, base


def train(model: Any, steps: int, *, learning_rate: float = 1e-2, decay: float = 0.1) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=decay)
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(input_ids=INPUTS, labels=INPUTS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=PROBE).logits
    return result


def base_weights(model: Any) -> dict[str, torch.Tensor]:
    """Returns the base's own tensors inside a model, by the base's names."""
    prefixes = ("base_model.model.", "base_model.")
    tensors = {}
    for name, tensor in model.named_parameters():
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        tensors[name.replace(".base_layer", "")] = tensor.detach()
    return tensors


def _merges(model: Any) -> bool:
    """Returns whether PEFT itself can merge the adapter."""
    try:
        copy.deepcopy(model).merge_and_unload()
    except (AttributeError, NotImplementedError, ValueError, TypeError):
        return False
    return not model.active_peft_config.is_prompt_learning


@pytest.mark.parametrize("name", CASES)
class TestEveryMethod:
    def test_trains_what_it_declares_and_leaves_the_rest_bit_identical(self, name: str) -> None:
        method, model, base = attached(name)
        summary = method.summary()
        # Of an estimator, an optimizer holds the distances to go, and not what moves.
        moves = method.learned_tensors() if isinstance(method, Estimator) else method.trained_parameters()
        declared = sum(tensor.numel() for tensor in moves.values())
        assert 0 < summary.trained <= declared
        assert summary.trained == declared or isinstance(method, ScheduledTensors)  # which train some at a time
        assert summary.total == sum(p.numel() for p in base.parameters())
        start = {key: tensor.clone() for key, tensor in (base_weights(model) | method.learned_tensors()).items()}
        losses = train(model, 20)
        assert losses[-1] < losses[0]
        now = base_weights(model) | method.learned_tensors()
        assert any(not torch.equal(tensor.detach(), start[key]) for key, tensor in now.items() if key in start)
        touched = method.touched()
        own = {key: p.detach() for key, p in base.named_parameters()}
        for key, tensor in base_weights(model).items():
            if key in own and key not in touched and tensor.shape == own[key].shape:
                assert torch.equal(tensor, own[key]), key

    def test_trains_where_only_the_model_is_kept(self, name: str) -> None:
        model = attached(name)[1]
        gc.collect()
        before = logits(model)
        train(model, 3)
        assert not torch.equal(logits(model), before)

    def test_saves_little_and_loads_bit_for_bit(self, name: str, tmp_path: Path) -> None:
        method, model, base = attached(name)
        train(model, 4)
        method.save(tmp_path / "out")
        method.save(tmp_path / "out")  # over an earlier state
        size = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
        # Values, base values and indices of what trains, once more what only resuming needs, buffers, and headers.
        frozen_buffers = sum(t.numel() * t.element_size() for n, t in model.named_buffers() if "rotary" not in n)
        assert size <= 4 * 4 * method.summary().trained + frozen_buffers + 64_000
        expected = logits(model)
        again, fresh, _ = attached(name, seed=99)
        again.load(tmp_path / "out")
        fresh.eval()
        assert torch.equal(logits(fresh), expected)
        loaded = finetune.load(copy.deepcopy(base), tmp_path / "out")
        if name in CROPPED:
            torch.testing.assert_close(logits(loaded), expected, atol=1e-5, rtol=1e-5)
        else:
            assert torch.equal(logits(loaded), expected)

    def test_goes_on_from_its_state_as_if_never_stopped(self, name: str, tmp_path: Path) -> None:
        optimizers = []

        def start(seed: int) -> tuple[Method, Any, torch.optim.Optimizer]:
            method, model, _ = attached(name, seed=seed)
            optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2)
            optimizers.append(optimizer)
            return method, model, optimizer

        def run(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
            model.train()
            for step in steps:
                torch.manual_seed(step)  # dropout and noise of the step
                model(input_ids=INPUTS, labels=INPUTS).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        method, model, optimizer = start(3)
        run(model, optimizer, range(3))
        method.save(tmp_path)
        state = copy.deepcopy(optimizer.state_dict())
        run(model, optimizer, range(3, 6))
        expected = {key: tensor.clone() for key, tensor in method.state_dict().items()}
        method, model, optimizer = start(99)
        method.load(tmp_path)
        optimizer.load_state_dict(state)
        run(model, optimizer, range(3, 6))
        found = method.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())

    def test_a_state_of_another_method_or_with_a_tensor_missing_is_refused(self, name: str, tmp_path: Path) -> None:
        method, _, _ = attached(name)
        state = {key: tensor.clone() for key, tensor in method.state_dict().items()}
        removed = next(iter(state))
        del state[removed]
        with pytest.raises((CheckpointError, KeyError)) as caught:
            method.load_state_dict(state)
        assert removed.rpartition(".")[2] in str(caught.value)
        other = "lora" if name != "lora" else "dora"
        stranger, _, _ = attached(other)
        stranger.save(tmp_path)
        with pytest.raises(CheckpointError):
            method.load(tmp_path)

    def test_merges_into_the_plain_model_or_says_why_not(self, name: str) -> None:
        method, model, base = attached(name)
        train(model, 4)
        expected = logits(model)
        if method.kind == "adapter" and not _merges(model):
            with pytest.raises(CapabilityError, match="cannot be merged"):
                method.merge()
            return
        plain = method.merge()
        assert type(plain) is type(base)
        assert list(plain.state_dict()) == list(base.state_dict())
        torch.testing.assert_close(logits(plain), expected, atol=2e-5, rtol=1e-4)

    def test_works_on_a_bfloat16_base(self, name: str) -> None:
        method, model, base = attached(name, dtype=torch.bfloat16)
        losses = train(model, 6)
        assert losses[-1] < losses[0]
        assert all(p.dtype == torch.float32 for p in method.trained_parameters().values() if p.requires_grad)
        frozen = {key: p for key, p in base_weights(model).items() if not p.requires_grad}
        touched = method.touched()
        own = {key: p.detach() for key, p in base.named_parameters()}
        shared = [key for key in frozen if key in own and key not in touched and frozen[key].shape == own[key].shape]
        assert all(torch.equal(frozen[key], own[key]) for key in shared if frozen[key].dtype == torch.bfloat16)

    def test_recomputed_activations_give_the_same_gradients(self, name: str) -> None:
        def gradients(*, recompute: bool) -> dict[str, torch.Tensor]:
            _, model, _ = attached(name)
            if recompute:
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.enable_input_require_grads()
            model.train()
            torch.manual_seed(0)
            model(input_ids=INPUTS, labels=INPUTS, use_cache=False).loss.backward()
            return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

        kept = gradients(recompute=False)
        # One that declares that it cannot, which finetune train refuses, has to be right about that.
        with nullcontext() if METHODS.get(name).recomputes else pytest.raises(RuntimeError, match="size of tensor"):
            recomputed = gradients(recompute=True)
            assert recomputed.keys() == kept.keys()
            for key, gradient in kept.items():
                torch.testing.assert_close(recomputed[key], gradient, atol=1e-6, rtol=1e-5)

    def test_accumulated_gradients_equal_those_of_the_whole_batch(self, name: str) -> None:
        whole: list[dict[str, torch.Tensor]] = []
        parts: list[dict[str, torch.Tensor]] = []
        for collected, cuts in ((whole, [slice(0, 4)]), (parts, [slice(0, 1), slice(1, 3), slice(3, 4)])):
            _, model, _ = attached(name)
            model.eval()  # no dropout: it differs from batch to batch
            for cut in cuts:
                rows = INPUTS[cut]
                items = torch.tensor(INPUTS[:, 1:].numel())
                # As accelerate does it for every trainer.
                GradientState()._set_sync_gradients(cut is cuts[-1])
                model(input_ids=rows, labels=rows, num_items_in_batch=items).loss.backward()
            collected.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
        # An exception has to be one.
        with pytest.raises(AssertionError) if name in BATCH_DEPENDENT else nullcontext():
            for key, gradient in whole[0].items():
                # A measured slope is a difference of float32 losses near 6, each 2.4e-7 wrong, over 2e-3.
                atol = 1e-3 if issubclass(METHODS.get(name), Estimator) else 1e-6
                torch.testing.assert_close(parts[0][key], gradient, atol=atol, rtol=1e-4)

    def test_the_model_survives_pickling(self, name: str) -> None:
        _, model, _ = attached(name)
        model.eval()
        expected = logits(model)
        # An exception has to be one.
        with pytest.raises(AttributeError, match="local object") if name in UNPICKLABLE else nullcontext():
            assert torch.equal(logits(pickle.loads(pickle.dumps(model))), expected)


@pytest.mark.parametrize("name", [name for name in discover() if getattr(METHODS.get(name), "unsuitable", "")])
def test_what_cannot_fine_tune_a_causal_lm_refuses_with_the_reason(name: str) -> None:
    with pytest.raises(CapabilityError, match="cannot fine-tune"):
        make(name)
