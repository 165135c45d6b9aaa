"""The two passes of a step of MoSA: what they draw, also when computed again, and the loss of both."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from finetune.core.errors import CapabilityError, TrainingError
from finetune.methods.primitives.expert_draw import Draw
from finetune.methods.primitives.mosa_tuner import MosaConfig
from finetune.methods.primitives.symmetric_kl import CHUNK, symmetric_kl, symmetric_kl_of_hidden
from finetune.training.loss import LeanLoss
from support.tiny import tiny_gemma2, tiny_gpt2, tiny_llama, token_batch

ROWS = token_batch(3, 12)


def mosa(model: Any = None, *, warm: bool = True, **changes: Any) -> Any:
    """Returns a model in training, whose second factor is not zero, so that passes differ from the start."""
    settings = {"r": 4, "n_experts": 3, "split": "both", "target_modules": "all-linear", **changes}
    config = MosaConfig(task_type="CAUSAL_LM", **settings)  # type: ignore[arg-type]
    adapted: Any = get_peft_model(tiny_llama() if model is None else model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "mosa_b" in name and warm:
                parameter.normal_(std=0.3, generator=generator)
    return adapted.train()


def labels() -> Tensor:
    """Labels of which some do not count, of each row others."""
    kept = ROWS.clone()
    kept[0, :5], kept[1, 9:], kept[2, 3] = -100, -100, -100
    return kept


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # One order of summation for another.
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4)


class TestDivergence:
    def dense(self, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p, q = (logits.double().detach().requires_grad_() for logits in (p, q))
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        both = [(a.detach(), b) for a, b in ((log_q, log_p), (log_p, log_q))]
        value = sum((target.exp() * (target - own)).sum() for target, own in both) / 2
        return (value.detach(), *torch.autograd.grad(value, (p, q)))

    @pytest.mark.parametrize("rows", [1, CHUNK, 2 * CHUNK + 3])
    def test_and_its_gradients_are_the_dense_ones_in_float64(self, rows: int) -> None:
        p, q = (torch.randn(rows, 17, dtype=torch.float64, requires_grad=True) for _ in range(2))
        found = symmetric_kl(p, q)
        for ours, reference in zip((found, *torch.autograd.grad(found, (p, q))), self.dense(p, q), strict=True):
            torch.testing.assert_close(ours.detach(), reference, atol=1e-12, rtol=1e-12)

    def test_of_bfloat16_logits_is_computed_in_float32(self) -> None:
        p, q = (torch.randn(300, 17).bfloat16().requires_grad_() for _ in range(2))
        found = symmetric_kl(p, q)
        assert found.dtype == torch.float32
        expected, of_p, _ = self.dense(p, q)
        assert torch.allclose(found.double(), expected, rtol=1e-5)
        # A gradient of bfloat16 has eight bits.
        assert torch.allclose(torch.autograd.grad(found, p)[0].double(), of_p, rtol=2**-8, atol=1e-6)

    def test_of_equal_passes_is_zero(self) -> None:
        p = torch.randn(5, 9)
        assert symmetric_kl(p, p.clone()) == 0

    @pytest.mark.parametrize("trained_head", [False, True])
    def test_of_hidden_states_is_that_of_their_logits(self, trained_head: bool) -> None:
        head = nn.Linear(8, 17).requires_grad_(trained_head)
        inputs = [torch.randn(CHUNK + 5, 8, requires_grad=True) for _ in range(2)] + list(head.parameters())
        inputs = [tensor for tensor in inputs if tensor.requires_grad]
        p, q = inputs[:2]
        found, expected = symmetric_kl_of_hidden(p, q, head), symmetric_kl(head(p), head(q))
        assert torch.allclose(found, expected)
        pairs = (torch.autograd.grad(value, inputs) for value in (found, expected))
        assert all(torch.allclose(*pair, atol=1e-5, rtol=1e-4) for pair in zip(*pairs, strict=True))


class TestLoss:
    def pieces(self, model: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns CE(p), CE(q) and symKL(p, q) of the next forward, by the definition."""
        found = []
        for beta, gamma in ((0.0, 1e-9), (1.0, 0.0), (0.0, 1.0)):
            twin = copy.deepcopy(model)
            twin.peft_config["default"].beta, twin.peft_config["default"].gamma = beta, gamma
            found.append(twin(input_ids=ROWS, labels=labels()).loss.detach())
        return found[0], found[1] - found[0], found[2] - found[0]

    def test_is_the_sum_of_its_parts(self) -> None:
        model = mosa(beta=0.5, gamma=2.0)
        first, second, between = self.pieces(model)
        assert between > 1e-3
        loss = model(input_ids=ROWS, labels=labels()).loss
        assert torch.allclose(loss, first + 0.5 * second + 2.0 * between, rtol=1e-5)

    def test_has_no_divergence_where_there_is_one_expert(self) -> None:
        one = mosa(n_experts=1)
        _, _, between = self.pieces(one)
        assert between == 0

    @pytest.mark.parametrize("beta", [0.0, 0.5])
    def test_is_averaged_over_the_items_of_all_micro_batches(self, beta: float) -> None:
        model = mosa(beta=beta)
        count = int((labels()[:, 1:] != -100).sum())
        mean = copy.deepcopy(model)(input_ids=ROWS, labels=labels()).loss
        for items in (4 * count, torch.tensor(4 * count)):
            part = copy.deepcopy(model)(input_ids=ROWS, labels=labels(), num_items_in_batch=items).loss
            assert torch.allclose(4 * part, mean)

    def test_of_a_micro_batch_without_labels_is_nothing(self) -> None:
        for lean in (False, True):
            model = mosa()
            if lean:
                LeanLoss(model)
            loss = model(input_ids=ROWS, labels=torch.full_like(ROWS, -100), num_items_in_batch=7).loss
            loss.backward()
            assert loss == 0
            assert all(gradient.abs().max() == 0 for gradient in gradients(model).values())

    @pytest.mark.parametrize("beta", [0.0, 0.5])
    @pytest.mark.parametrize(("build", "form"), [(tiny_llama, "chunked"), (tiny_gemma2, "selected")])
    def test_is_the_same_where_no_more_than_a_chunk_of_logits_exists(
        self, build: Callable[[], Any], form: str, beta: float
    ) -> None:
        stock = mosa(build(), beta=beta)
        lean = copy.deepcopy(stock)
        assert LeanLoss(lean).form == form
        losses = [model(input_ids=ROWS, labels=labels()).loss for model in (stock, lean)]
        assert torch.allclose(*losses)
        for loss in losses:
            loss.backward()
        assert_same(gradients(lean), gradients(stock))

    def test_leaves_the_output_of_the_first_pass_as_the_model_makes_it(self) -> None:
        model = mosa()
        single = copy.deepcopy(model)
        single.peft_config["default"].gamma = 0.0
        found, expected = (each(input_ids=ROWS, labels=labels()) for each in (model, single))
        assert torch.equal(found.logits, expected.logits)
        loss, *_ = copy.deepcopy(model)(input_ids=ROWS, labels=labels(), return_dict=False)
        assert loss.ndim == 0

    def test_without_logits_is_refused(self) -> None:
        model = mosa()

        def fused(module: Any, given: Any, output: Any) -> None:
            output.logits = None

        model.get_base_model().register_forward_hook(fused)
        with pytest.raises(CapabilityError, match="needs logits"):
            model(input_ids=ROWS, labels=ROWS)


class TestDraws:
    def test_are_a_function_of_seed_forward_pass_and_matrix(self) -> None:
        def draw(seed: int = 0, forward: int = 0, number: int = 0, matrix: str = "q a") -> list[int]:
            return [Draw({"x": seed}, {"x": forward + k}, number).expert("x", matrix, 4) for k in range(400)]

        assert draw() == draw()
        for other in (draw(seed=1), draw(number=1), draw(matrix="q b"), draw(forward=1000)):
            assert 0.15 < sum(a == b for a, b in zip(draw(), other, strict=True)) / 400 < 0.35
        # Of 400 fair draws of four, each share lies within 4 standard deviations of a hundred.
        assert all(abs(count - 100) < 4 * 75**0.5 for count in Counter(draw()).values())

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
    def test_are_the_same_when_activations_are_computed_again(self, build: Any, reentrant: bool) -> None:
        kept = mosa(build(), dropout=0.1)
        again = copy.deepcopy(kept)
        again.gradient_checkpointing_enable({"use_reentrant": reentrant})
        again.enable_input_require_grads()
        for model in (kept, again):
            torch.manual_seed(0)
            # Of two forwards that wait for one backward, the first is computed again last.
            losses = [model(input_ids=ROWS + shift, labels=labels()).loss for shift in (0, 1)]
            sum(losses).backward()
        assert_same(gradients(again), gradients(kept))

    def test_are_lost_in_a_wrapper_that_checkpoints_and_that_is_refused(self) -> None:
        model = mosa()
        blocks = model.get_base_model().model.layers
        blocks[0] = checkpoint_wrapper(blocks[0])
        loss = model(input_ids=ROWS, labels=ROWS).loss
        with pytest.raises(TrainingError, match="gradient_checkpointing_enable"):
            loss.backward()

    def test_are_made_in_training_only(self) -> None:
        model = mosa(n_experts=2).eval()
        forwards = model.base_model.mosa_forwards["default"]
        model(input_ids=ROWS, labels=ROWS).loss.backward()
        assert forwards.value == 0
        assert all(p.grad is not None for name, p in model.named_parameters() if "expert_" in name)
        model.train()
        with torch.no_grad():
            generated = model.generate(input_ids=ROWS[:1], max_new_tokens=2, do_sample=False)
            assert torch.equal(model(input_ids=ROWS).logits, model.eval()(input_ids=ROWS).logits)
        assert generated.shape == (1, 14)
        assert forwards.value == 0
