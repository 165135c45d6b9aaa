"""Zeroth-order methods against numbers worked by hand, dense references in float64, and closed forms."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import finetune
from finetune.core.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    FinetuneError,
    FinetuneWarning,
    TargetError,
    TrainingError,
)
from finetune.export.run import export_run
from finetune.methods import build_method
from finetune.methods.primitives.add_noise import add_noise
from finetune.methods.primitives.dense_directions import direction_numbers
from finetune.methods.primitives.hash_noise import derive_key, hash_tile, noise_of_hash, row_vectors
from finetune.methods.primitives.low_rank_directions import SideBranch
from finetune.methods.primitives.slope_rules import ONE_SIDED, TWO_POINT, Estimate, Losses, SlopeRule
from finetune.models import load_model
from support.tiny import save_tiny_model, tiny_gpt2, tiny_llama, tiny_mixtral, token_batch

IDS = token_batch(4, 12)
NAMES = ("mezo", "lozo")
BASE_DTYPE = {"trainable_dtype": "base"}
LOSS_ROUNDING = 5e-3
"""Of a slope at eps = 1e-3: transformers rounds a loss near 6 to float32, by up to
2.4e-7, and the estimate has a bias of eps^2 times a third derivative."""


class Quadratic(nn.Module):
    """``f = 1/2 sum theta^2``, with the face of a causal LM."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta)

    def get_input_embeddings(self) -> None:
        return None

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, labels: Any = None, use_cache: bool = False) -> dict[str, Tensor]:
        return {"loss": self.theta.square().sum() / 2}


def slope(model: Any, ids: Tensor = IDS) -> Tensor:
    """Returns what backward delivers, and takes it away again."""
    model(input_ids=ids, labels=ids).loss.backward()
    found: Tensor = model.projected_gradient.grad.clone()
    model.projected_gradient.grad = None
    return found


def estimate(rule: SlopeRule, loss_at: Losses, *, queries: int, eps: float) -> Estimate:
    return rule.estimate(rule.measure(loss_at, rule.points(queries), eps), eps)


def steps(method: Any, model: Any, count: int, *, lr: float = 1e-3, decay: float = 0.0) -> None:
    optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=lr, weight_decay=decay)
    for step in range(count):
        ids = token_batch(4, 12, seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def field(key: int, rows: int, columns: int) -> Tensor:
    a, b = row_vectors(key, 0, rows, torch.device("cpu"))
    return noise_of_hash(hash_tile(a, b, torch.arange(columns, dtype=torch.int32)), "rademacher").double()


@torch.no_grad()
def loss_with(base: PreTrainedModel, moved: dict[str, Tensor]) -> float:
    """Returns the loss of a plain copy whose weights are changed by ``moved``."""
    plain = copy.deepcopy(base)
    for name, change in moved.items():
        plain.get_parameter(name).add_(change)
    return float(plain(input_ids=IDS, labels=IDS).loss)


class TestArithmetic:
    """Section 11 of the zeroth-order specification."""

    def test_two_points_of_a_quadratic_give_its_slope_exactly(self) -> None:
        theta, z, curvature = torch.tensor([1.0, -2.0]), torch.tensor([1.0, -1.0]), torch.tensor([2.0, 1.0])

        def loss_at(query: int, scale: float) -> Tensor:
            return (curvature * (theta.double() + scale * z).square()).sum() / 2

        assert float(loss_at(0, 0.1)) == pytest.approx(3.415)
        assert float(loss_at(0, -0.1)) == pytest.approx(2.615)
        found = estimate(TWO_POINT, loss_at, queries=1, eps=0.1)
        assert float(found.slopes) == pytest.approx(4.0)
        assert float(found.loss) == pytest.approx(3.015)
        moved = theta - 0.1 * float(found.slopes) * z
        torch.testing.assert_close(moved, torch.tensor([0.6, -1.6]))

    def test_one_sided_slopes_of_a_quadratic(self) -> None:
        # f(theta) = 3; along (1, -1) f = 3.415, a slope of 4.15; along (1, 1): (2 * 1.21 + 3.61) / 2 = 3.015. Their
        # deviation is 0.4 / sqrt(2).
        theta, curvature = torch.tensor([1.0, -2.0]).double(), torch.tensor([2.0, 1.0])
        directions = torch.tensor([[1.0, -1.0], [1.0, 1.0]])

        def loss_at(query: int, scale: float) -> Tensor:
            return (curvature * (theta + scale * directions[query]).square()).sum() / 2

        assert (float(loss_at(0, 0.1)) - float(loss_at(0, 0.0))) / 0.1 == pytest.approx(4.15)
        found = estimate(ONE_SIDED, loss_at, queries=2, eps=0.1)
        sigma = 0.4 / math.sqrt(2)
        assert found.slopes.tolist() == pytest.approx([0.415 / (2 * sigma), 0.015 / (2 * sigma)])
        assert float(found.loss) == 3.0
        flat = estimate(ONE_SIDED, lambda query, scale: torch.ones(()), queries=2, eps=0.1)
        assert flat.slopes.tolist() == [0.0, 0.0]

    def test_the_keyed_run(self) -> None:
        start = torch.tensor([[1.0, 2, 3, 4], [-1, -2, -3, -4]], dtype=torch.float64)
        method = finetune.method("mezo", seed=42, eps=0.1, engine="copy")
        model: Any = method.attach(Quadratic(start))
        optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=0.05)
        for expected_slope, value in ((-4.0, 29.36), (-6.4, 27.7216), (-6.64, 25.958016)):
            model(labels=True)["loss"].backward()
            assert float(model.projected_gradient.grad) == pytest.approx(expected_slope, rel=1e-6)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                assert float(model()["loss"]) == pytest.approx(value, rel=1e-6)
        expected = torch.tensor([[1.212, 2.188, 2.812, 3.148], [-1.212, -2.452, -2.788, -3.548]], dtype=torch.float64)
        # The distance of a step is a float32 number.
        torch.testing.assert_close(method.merge().get_parameter("theta").data, expected, rtol=1e-6, atol=0)

    @pytest.mark.parametrize(("v", "expected"), [((1.0, 1.0, -1.0), (7.0, -1.0)), ((1.0, 1.0, 1.0), (7.6, -1.6))])
    def test_a_rank_one_side_branch(self, v: tuple[float, ...], expected: tuple[float, ...]) -> None:
        layer = nn.Linear(3, 2, bias=False)
        layer.weight.data = torch.tensor([[1.0, 0, 2], [0, 1, -1]])
        branch = SideBranch(layer)
        branch.perturbation = (0.1 * torch.tensor([[1.0], [-1.0]]), torch.tensor(v)[:, None])
        with torch.no_grad():
            found = layer(torch.tensor([[1.0, 2, 3]]))
        torch.testing.assert_close(found, torch.tensor([expected]))

    # E |g z|^2 / |G|^2 over directions; 4,000 of them leave an error of some sqrt(2 (d + 2) / 4000) ~ 1.5 % of it.
    @pytest.mark.parametrize(("noise", "expected"), [("rademacher", 20.0), ("gaussian", 22.0)])
    def test_second_moments_of_the_estimate(self, noise: str, expected: float) -> None:
        gradient = torch.linspace(-1, 1, 20)
        a, b = row_vectors(derive_key(9), 0, 40_000, torch.device("cpu"))
        z = noise_of_hash(hash_tile(a, b, torch.arange(20, dtype=torch.int32)), noise)  # type: ignore[arg-type]
        estimates = (z @ gradient)[:, None] * z
        ratio = estimates.square().sum(1).mean() / gradient.square().sum()
        assert float(ratio) == pytest.approx(expected, rel=0.02)
        assert float((estimates.mean(0) - gradient).norm() / gradient.norm()) < 1.2 * math.sqrt(expected / 40_000)

    def test_contraction_on_the_quadratic(self) -> None:
        # 1 - 1/c per step with the best step 1/c, c = d: (1 - 1/200)^50 = 0.778 in the mean over starts.
        ratios = []
        for seed in range(6):
            method = finetune.method("mezo", seed=seed, eps=1e-2, engine="inplace")
            theta = torch.randn(8, 25, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            model: Any = method.attach(Quadratic(theta.clone()))
            optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=1 / 200)
            for _ in range(50):
                model(labels=True)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            ratios.append(float(model.theta.detach().square().sum() / theta.square().sum()))
        # One run varies by some 0.05.
        assert sum(ratios) / 6 == pytest.approx(0.778, abs=0.06)


class TestSlopes:
    @pytest.mark.parametrize("engine", ["copy", "onthefly", "inplace"])
    @pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_mixtral])
    def test_mezo_measures_along_the_field_of_its_key(self, build: Any, engine: str) -> None:
        # torch multiplies the experts' weights in 32 bit at most.
        base = build(dtype=torch.float32 if build is tiny_mixtral else torch.float64)
        numbers = direction_numbers([name for name, _ in base.named_parameters()])
        moved = {}
        for name, parameter in base.named_parameters():
            rows = parameter.numel() // parameter.shape[-1]
            z = field(derive_key(5, 0, 0, numbers[name]), rows, parameter.shape[-1]).view_as(parameter)
            moved[name] = 1e-3 * z.to(parameter.dtype)
        expected = (loss_with(base, moved) - loss_with(base, {n: -m for n, m in moved.items()})) / 2e-3
        model = finetune.method("mezo", seed=5, engine=engine).attach(copy.deepcopy(base))
        # Delivered in float32; in place, float32 weights come back with a rounding.
        assert float(slope(model)) == pytest.approx(expected, rel=1e-3 if build is tiny_mixtral else 1e-6)

    @pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
    def test_lozo_measures_what_the_dense_direction_gives(self, build: Any) -> None:
        base = build(dtype=torch.float64)
        method = finetune.method("lozo", seed=5, rank=2, queries=2, eps=1e-3)
        model = method.attach(copy.deepcopy(base))
        names = list(method._directions.branches)
        numbers = direction_numbers(names)
        expected = []
        for query in range(2):
            moved = {}
            for name in names:
                weight = base.get_parameter(name)
                rows, columns = weight.shape if build is tiny_llama else weight.shape[::-1]
                u = field(derive_key(5, 0, query, 2 * numbers[name]), 2, rows)
                v = field(derive_key(5, 0, query, 2 * numbers[name] + 1), 2, columns)
                z = (u.t() @ v) / math.sqrt(2)
                moved[name] = 1e-3 * (z if build is tiny_llama else z.t())
            difference = loss_with(base, moved) - loss_with(base, {n: -m for n, m in moved.items()})
            expected.append(difference / 2e-3 / 2)  # the mean over two queries
        torch.testing.assert_close(slope(model), torch.tensor(expected), rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("name", NAMES)
    def test_the_slope_is_that_of_autograd(self, name: str) -> None:
        base = tiny_llama(dtype=torch.float64)
        method = finetune.method(name, eps=1e-3)
        model = method.attach(copy.deepcopy(base))
        found = float(slope(model))
        method._directions.move(torch.ones(1))
        tuned = dict(method.merge().named_parameters())
        reference = copy.deepcopy(base)
        reference(input_ids=IDS, labels=IDS).loss.backward()
        along = [(p.grad * (tuned[n] - p)).sum() for n, p in reference.named_parameters()]
        assert found == pytest.approx(float(sum(along).detach()), abs=LOSS_ROUNDING)  # type: ignore[union-attr]

    def test_a_tied_tensor_moves_once(self) -> None:
        base = tiny_llama(tied=True, dtype=torch.float64)
        method = build_method([{"name": "freeze", "train": ["embed"]}, {"name": "mezo", "eps": 1e-3}])
        model: Any = method.attach(copy.deepcopy(base))
        reference: Any = copy.deepcopy(base)
        reference(input_ids=IDS, labels=IDS).loss.backward()
        z = field(derive_key(0, 0, 0, 0), 320, 32)
        expected = float((reference.model.embed_tokens.weight.grad * z).sum())
        assert float(slope(model)) == pytest.approx(expected, abs=LOSS_ROUNDING)
        steps(method, model, 2)
        assert model.lm_head.weight is model.model.embed_tokens.weight

    @pytest.mark.parametrize("name", NAMES)
    def test_the_loss_is_the_mean_of_both_sides_and_nothing_else_is_drawn(self, name: str) -> None:
        model = finetune.method(name, eps=1e-4).attach(tiny_llama())
        model.train()
        before = torch.get_rng_state()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        assert torch.equal(torch.get_rng_state(), before)
        with torch.no_grad():
            plain = model(input_ids=IDS, labels=IDS).loss
        assert float(loss.detach()) == pytest.approx(float(plain), abs=1e-4)
        assert model.training


class TestWhatMoves:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_steps_of_no_length_leave_every_bit(self, name: str, dtype: torch.dtype) -> None:
        base = tiny_llama(dtype=dtype)
        method = finetune.method(name)
        steps(method, method.attach(copy.deepcopy(base)), 20, lr=0.0)
        tuned = dict(method.merge().named_parameters())
        assert all(torch.equal(tuned[key], weight) for key, weight in base.named_parameters())

    def test_steps_in_place_leave_rounding_behind(self) -> None:
        base = tiny_llama()
        method = finetune.method("mezo", engine="inplace")
        steps(method, method.attach(copy.deepcopy(base)), 20, lr=0.0)
        tuned = dict(method.merge().named_parameters())
        drift = torch.cat([(tuned[key] - weight).flatten() for key, weight in base.named_parameters()])
        # Two roundings per pass of weights below 1, at half a unit of 6e-8 each.
        assert 0 < float(drift.abs().max()) < 80 * 6e-8

    def test_a_mask_of_tensors_keeps_the_others_under_weight_decay(self) -> None:
        base = tiny_llama()
        method = build_method([{"name": "top_layers", "count": 1}, {"name": "mezo"}])
        steps(method, method.attach(copy.deepcopy(base)), 10, decay=0.5)
        tuned = dict(method.merge().named_parameters())
        for key, weight in base.named_parameters():
            assert torch.equal(tuned[key], weight) == ("layers.1." not in key and key != "model.norm.weight"), key

    def test_sparse_mezo_keeps_the_large_entries(self) -> None:
        base = tiny_llama()
        method = finetune.method("sparse_mezo", sparsity=0.6)
        steps(method, method.attach(copy.deepcopy(base)), 5, lr=1e-4, decay=0.5)
        tuned = dict(method.merge().named_parameters())
        for key, weight in base.named_parameters():
            small = weight.abs() <= weight.abs().flatten().sort().values[round(0.4 * weight.numel()) - 1]
            assert torch.equal(tuned[key][~small], weight[~small]), key
            assert (tuned[key][small] != weight[small]).all(), key

    def test_decay_shrinks_matrices_and_not_vectors(self) -> None:
        base = tiny_llama()
        method = finetune.method("mezo")
        model = method.attach(copy.deepcopy(base))
        optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=0.1, weight_decay=0.5)
        model.projected_gradient.grad = torch.zeros(1)
        optimizer.step()
        tuned = dict(method.merge().named_parameters())
        for key, weight in base.named_parameters():
            assert torch.equal(tuned[key], weight * 0.95 if weight.ndim > 1 else weight), key

    @pytest.mark.parametrize("earlier", [{"name": "lora", "r": 2}, {"name": "spectrum", "top_percent": 50}])
    def test_an_adapter_or_a_mask_narrows(self, earlier: dict[str, Any], tmp_path: Path) -> None:
        base = tiny_llama()
        method = build_method([earlier, {"name": "mezo", "eps": 1e-2}])
        model = method.attach(copy.deepcopy(base))
        start = {key: tensor.clone() for key, tensor in method.learned_tensors().items()}
        steps(method, model, 3, lr=1e-2)
        assert all(not torch.equal(tensor, start[key]) for key, tensor in method.learned_tensors().items())
        if earlier["name"] == "lora":
            assert all("lora_" in key for key in start)
            frozen = {key: p for key, p in model.named_parameters() if "lora_" not in key and "projected" not in key}
            own = dict(base.named_parameters())
            assert all(
                torch.equal(p, own[key.removeprefix("base_model.model.").replace(".base_layer", "")])
                for key, p in frozen.items()
            )
        method.save(tmp_path)
        with torch.no_grad():
            expected = model(input_ids=IDS).logits
            found = finetune.load(copy.deepcopy(base), tmp_path)(input_ids=IDS).logits
        assert torch.equal(found, expected)

    def test_names_of_wrappers_do_not_change_the_noise(self) -> None:
        assert direction_numbers(["model.b.weight", "model.a.weight"]) == {"model.a.weight": 0, "model.b.weight": 1}
        wrapped = ["base_model.model.model.b.weight", "module._orig_mod.model.a.weight"]
        assert direction_numbers(wrapped) == {wrapped[1]: 0, wrapped[0]: 1}

    def test_noise_of_a_transposed_tensor_is_that_of_its_entries(self) -> None:
        weight = torch.zeros(6, 9)
        out = torch.zeros(9, 6).t()
        add_noise(out, weight, [derive_key(1)], torch.ones(1))
        assert torch.equal(out, field(derive_key(1), 6, 9).float())


class TestMomentum:
    """LOZO-M: momentum over the left factors, carried over to a new right factor."""

    def test_it_is_the_dense_recursion_within_an_interval(self) -> None:
        beta, distances = 0.6, [0.5, -0.2, 0.1]
        method = finetune.method("lozo", momentum=beta, rank=2)
        method.attach(tiny_llama())
        directions = method._directions
        dense = {name: torch.zeros(b.widths[1], b.widths[0]) for name, b in directions.branches.items()}
        smooth = {name: tensor.clone() for name, tensor in dense.items()}
        for distance in distances:
            for name, branch in directions.branches.items():
                z = directions._left_factors()[name] @ branch.right.t()
                smooth[name] = beta * smooth[name] + (1 - beta) * distance * z
                dense[name] += smooth[name]
            directions.move(torch.tensor([distance]))
        for name, branch in directions.branches.items():
            torch.testing.assert_close(branch.left @ branch.right.t(), dense[name])

    def test_a_new_right_factor_gets_what_it_can_express(self) -> None:
        method = finetune.method("lozo", momentum=0.5, lazy_interval=1)
        method.attach(tiny_llama())
        directions = method._directions
        name, branch = next(iter(directions.branches.items()))
        u, v = directions._left_factors()[name][:, 0], branch.right[:, -1]
        directions.move(torch.tensor([2.0]))
        # (1 - 0.5) * 2 u, times the cosine of the old and the new v: signs, of norm sqrt(n).
        cosine = v @ branch.right[:, -1] / len(v)
        torch.testing.assert_close(directions.momenta[name][:, 0], u * cosine)

    def test_a_step_of_no_length_moves_nothing(self) -> None:
        method = finetune.method("lozo", momentum=0.9)
        method.attach(tiny_llama())
        method._directions.move(torch.ones(1))
        before = {key: tensor.clone() for key, tensor in method.state_dict().items()}
        method._directions.move(torch.zeros(1))
        assert all(torch.equal(tensor, before[key]) for key, tensor in method.state_dict().items())

    @pytest.mark.parametrize("taken", [3, 4])
    def test_it_goes_on_from_a_state_and_from_the_log(self, taken: int, tmp_path: Path) -> None:
        config: dict[str, Any] = {"momentum": 0.9, "lazy_interval": 4}
        method = finetune.method("lozo", **config)
        model = method.attach(tiny_llama())
        steps(method, model, taken, lr=1e-2)
        method.save(tmp_path)
        log = method.state_dict()
        replayed = finetune.method("lozo", **config)
        replayed.attach(tiny_llama())
        replayed.replay(log["training/distances"], log["training/decays"])
        resumed = finetune.method("lozo", **config)
        resumed.attach(tiny_llama())
        resumed.load(tmp_path)
        for one in (method, replayed, resumed):
            steps(one, one.model, 3, lr=1e-2)
        expected = method.state_dict()
        for one in (replayed, resumed):
            found = one.state_dict()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


class TestPrecision:
    """The policy for 16-bit weights: spec, section 3.2 and invariant 16."""

    def test_rounding_by_chance_keeps_small_steps_on_average(self) -> None:
        start = torch.full((64, 256), 0.2).bfloat16()
        z = field(derive_key(0), 64, 256).float()
        by_chance, nearest = start.clone(), start.clone()
        for number in range(1000):
            # The same direction all the time; its rounding has to differ.
            signs = torch.full((1,), 1e-6)
            key = derive_key(3, number, 0, 0)
            sign = field(key, 64, 256).float() * z
            add_noise(by_chance, (by_chance.float() * sign).bfloat16(), [key], signs, stochastic=True)
            by_chance = (by_chance.float() * sign).bfloat16()
            add_noise(nearest, nearest, [derive_key(0)], signs)
        moved = float(((by_chance.float() - start.float()) * z).mean())
        # Standard error of the mean: 9.5e-4 / sqrt(16384) < 1 %.
        assert moved == pytest.approx(1e-3, rel=0.05)
        assert float(((nearest.float() - start.float()) * z).mean().abs()) < 1e-5

    def test_trained_as_they_are_bfloat16_weights_still_learn(self) -> None:
        method = finetune.method("mezo", trainable_dtype="base", eps=1e-2)
        model = method.attach(tiny_llama(dtype=torch.bfloat16))
        assert all(tensor.dtype == torch.bfloat16 for tensor in method.learned_tensors().values())
        optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=1e-4)
        losses = []
        for _ in range(40):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert sum(losses[-5:]) < sum(losses[:5])

    def test_in_place_16_bit_weights_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="100 steps move them by 4 %"):
            finetune.method("mezo", engine="inplace", trainable_dtype="base")
        assert finetune.method("mezo", engine="inplace", trainable_dtype="base", allow_drift=True)

    def test_float16_weights_as_they_are_are_refused(self) -> None:
        with pytest.raises(CapabilityError, match="float16 weights lose"):
            finetune.method("mezo", trainable_dtype="base").attach(tiny_llama(dtype=torch.float16))


class TestRefusals:
    def test_a_model_that_accelerate_offloads(self) -> None:
        model: Any = tiny_llama()
        model.hf_device_map = {"model.embed_tokens": 0, "model.layers": "cpu"}
        with pytest.raises(CapabilityError, match="accelerate keeps parts of the model elsewhere"):
            finetune.method("lozo").attach(model)

    @pytest.mark.parametrize("name", NAMES)
    def test_a_model_under_accelerates_hooks(self, name: str, tmp_path: Path) -> None:
        from accelerate import cpu_offload, disk_offload

        for offload, options in ((cpu_offload, {}), (disk_offload, {"offload_dir": str(tmp_path)})):
            model = tiny_llama(tied=False)
            offload(model, execution_device="cpu", **options)  # type: ignore[operator]
            with pytest.raises(CapabilityError, match="accelerate keeps parts of the model elsewhere") as caught:
                finetune.method(name).attach(model)
            assert "meta" in caught.value.got

    def test_a_training_pass_without_labels(self) -> None:
        model = finetune.method("lozo").attach(tiny_llama())
        model.train()
        with pytest.raises(TrainingError, match="called without labels"):
            model(input_ids=IDS)

    def test_a_loss_that_is_no_number(self) -> None:
        class Vector(Quadratic):
            def forward(self, labels: Any = None, use_cache: bool = False) -> dict[str, Tensor]:
                return {"loss": self.theta}

        model: Any = finetune.method("mezo", engine="copy").attach(Vector(torch.ones(2, 3)))
        with pytest.raises(TrainingError, match="no number") as caught:
            model(labels=True)
        assert "(2, 3)" in str(caught.value)

    def test_nothing_to_move(self) -> None:
        with pytest.raises(TargetError, match="holds no parameter"):
            build_method([{"name": "freeze", "train": ["norm"]}, {"name": "lozo"}]).attach(tiny_llama())

    def test_an_embedding_in_the_scope_of_lozo(self) -> None:
        with pytest.raises(TargetError, match="linear layers between") as caught:
            finetune.method("lozo", scope={"include": ["embed"]}).attach(tiny_llama())
        assert "model.embed_tokens.weight" in str(caught.value)

    @pytest.mark.parametrize("order", [["mezo", "s2ft"], ["lora", "lozo"], ["mezo", "lozo"], ["lora", "sparse_mezo"]])
    def test_orders_that_make_no_sense(self, order: list[str]) -> None:
        with pytest.raises(FinetuneError, match=f"{order[1]} cannot follow {order[0]}"):
            build_method([{"name": name} for name in order])

    def test_momentum_is_switched_off_with_a_word(self) -> None:
        method = finetune.method("lozo")
        model = method.attach(tiny_llama())
        optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=1e-3, momentum=0.9)
        model(input_ids=IDS, labels=IDS).loss.backward()
        with pytest.warns(FinetuneWarning, match="momentum of SGD is switched off"):
            optimizer.step()
        assert optimizer.param_groups[0]["momentum"] == 0.0

    @pytest.mark.parametrize("name", NAMES)
    def test_a_loss_that_is_not_finite_moves_nothing(self, name: str) -> None:
        method = finetune.method(name)
        model = method.attach(tiny_llama())
        before = {key: tensor.clone() for key, tensor in method.learned_tensors().items()}
        optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=1e-3)
        loss = model(input_ids=IDS, labels=IDS).loss
        (loss * math.nan).backward()
        optimizer.step()
        assert all(torch.equal(tensor, before[key]) for key, tensor in method.learned_tensors().items())


class TestLog:
    def run(self, folder: Path, name: str, **config: Any) -> tuple[Path, Any]:
        """Trains in a plain loop as ``finetune train`` would save it, and returns the folder and the tuned model."""
        save_tiny_model(folder / "base", dtype=torch.bfloat16)
        model = load_model(str(folder / "base"), dtype="bfloat16", device="cpu")
        method = finetune.method(name, queries=2, **config)
        steps(method, method.attach(model), 7, lr=1e-2, decay=0.1)
        method.save(folder / "learned")
        return folder / "learned", method.merge()

    @pytest.mark.parametrize(("name", "config"), [("mezo", {}), ("lozo", {"lazy_interval": 3}), ("mezo", BASE_DTYPE)])
    def test_a_log_on_its_base_gives_the_tuned_weights_again(
        self, tmp_path: Path, name: str, config: dict[str, Any]
    ) -> None:
        learned, tuned = self.run(tmp_path, name, **config)
        out = export_run(learned, tmp_path / "log", "zo-log")
        # 7 steps of 2 numbers of 4 bytes and one of 8, and what a file of tensors says of itself.
        assert (out / "delta.safetensors").stat().st_size < 7 * 16 + 400
        replayed = finetune.load(str(tmp_path / "base"), out, dtype="bfloat16")
        if name == "lozo":
            replayed = replayed.__dict__["_methods"][-1].merge()
        found = dict(replayed.named_parameters())
        assert all(torch.equal(found[key], weight) for key, weight in tuned.named_parameters())

    def test_a_log_replays_to_the_state_at_any_step(self) -> None:
        states = []
        method = finetune.method("lozo", lazy_interval=2)
        model = method.attach(tiny_llama())
        for _ in range(5):
            steps(method, model, 1, lr=1e-2)
            states.append({key: tensor.clone() for key, tensor in method.state_dict().items()})
        for state in states:
            fresh = finetune.method("lozo", lazy_interval=2)
            fresh.attach(tiny_llama())
            fresh.replay(state["training/distances"], state["training/decays"])
            assert all(torch.equal(tensor, state[key]) for key, tensor in fresh.state_dict().items())

    def test_a_base_of_other_weights_is_refused(self, tmp_path: Path) -> None:
        learned, _ = self.run(tmp_path, "lozo")
        out = export_run(learned, tmp_path / "log", "zo-log")
        base: Any = load_model(str(tmp_path / "base"), dtype="bfloat16", device="cpu")
        with torch.no_grad():
            base.model.norm.weight[3] += 1e-2  # an entry that the short fingerprint may not look at
        with pytest.raises(CheckpointError, match=r"base with other weights|another base"):
            finetune.load(base, out)

    def test_another_dtype_is_refused_where_steps_round_in_it(self, tmp_path: Path) -> None:
        learned, _ = self.run(tmp_path, "mezo", **BASE_DTYPE)
        out = export_run(learned, tmp_path / "log", "zo-log")
        with pytest.raises(CheckpointError, match="load the base in bfloat16"):
            finetune.load(str(tmp_path / "base"), out, dtype="float32")

    def test_what_has_no_log_is_refused(self, tmp_path: Path) -> None:
        method = build_method([{"name": "lora", "r": 2}, {"name": "mezo"}])
        method.attach(tiny_llama())
        method.save(tmp_path / "adapter")
        with pytest.raises(CapabilityError, match="what lora added or chose"):
            export_run(tmp_path / "adapter", tmp_path / "log", "zo-log")
        other = finetune.method("top_layers")
        other.attach(tiny_llama())
        other.save(tmp_path / "other")
        with pytest.raises(CapabilityError, match="only a zeroth-order run"):
            export_run(tmp_path / "other", tmp_path / "log", "zo-log")

    def test_lozo_exports_to_a_stock_lora_adapter(self, tmp_path: Path) -> None:
        from peft import PeftModel

        base = tiny_llama()
        method = finetune.method("lozo", lazy_interval=3, rank=2)
        model = method.attach(copy.deepcopy(base))
        steps(method, model, 7, lr=1e-1)
        method.export_adapter(tmp_path)
        with torch.no_grad():
            expected = model(input_ids=IDS).logits
            found = PeftModel.from_pretrained(base, tmp_path)(input_ids=IDS).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
