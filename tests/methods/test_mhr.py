"""MHR: worked examples, published counts, routing by task, adaptation to new tasks, PEFT's life of an adapter."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel, convert_to_lora, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaForCausalLM

import finetune
from finetune.core.errors import CapabilityError, CheckpointError, ConfigError, DataError, TargetError, TrainingError
from finetune.methods.primitives.calibration import single_examples
from finetune.methods.primitives.skill_layer import LinearSkills, _mix
from finetune.methods.primitives.skill_tuner import SkillsConfig, SkillsTuner
from finetune.methods.primitives.task_routing import gates, mixing_weights
from support.tiny import save_tiny_model, tiny_gpt2, tiny_llama, token_batch

ROWS = token_batch(3, 12)
TASKS = ["a", "b", "c"]
SMALL = {"tasks": TASKS, "r": 2, "n_skills": 3, "n_splits": 2, "target_modules": "all-linear", "router_speed": 1.0}


def mhr(model: Any = None, **changes: Any) -> Any:
    config = SkillsConfig(task_type="CAUSAL_LM", **{**SMALL, **changes})  # type: ignore[call-arg]
    return get_peft_model(tiny_llama() if model is None else model, config)


def stir(model: Any) -> Any:
    """Gives skills and routers values that tell tasks apart."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mhr_" in name:
                spread = 1.0 if "router" in name else 0.1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model.eval()


@torch.no_grad()
def logits(model: Any, rows: torch.Tensor = ROWS, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=rows, **options).logits
    return found


def layers_of(model: Any) -> dict[str, LinearSkills]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LinearSkills)}


class TestMixing:
    def test_gates_are_normalised_and_not_a_softmax(self) -> None:
        third = math.log(3)
        assert torch.allclose(mixing_weights(gates(torch.tensor([third, -third]))), torch.tensor([0.75, 0.25]))
        found = mixing_weights(gates(torch.tensor([0.0, -third])))
        assert torch.allclose(found, torch.tensor([2 / 3, 1 / 3]))

    def test_each_split_has_its_own_weights(self) -> None:
        skills = torch.tensor([[[[1.0], [2]], [[3], [4]]], [[[5], [6]], [[7], [8]]]])
        third = math.log(3)
        weights = mixing_weights(gates(torch.tensor([[[third, -third], [0, 0]]])))
        assert torch.allclose(_mix(skills, weights).flatten(), torch.tensor([1.5, 2.5, 6, 7]))

    def test_factors_are_mixed_before_they_are_multiplied(self) -> None:
        model = stir(mhr())
        model.base_model.use_task("b")
        name, layer = next(iter(layers_of(model).items()))
        logit = model.base_model.mhr_router["default"][1, 0].double()
        gate = torch.sigmoid(logit)
        weight = gate / gate.sum(-1, keepdim=True)
        first, second = layer.mhr_a["default"].double(), layer.mhr_b["default"].double()
        a = torch.cat([sum(weight[s, k] * first[s, k] for k in range(3)) for s in range(2)])
        b = torch.cat([sum(weight[s, k] * second[s, k] for k in range(3)) for s in range(2)])
        expected = 16 / 2 * b @ a.T
        assert torch.allclose(layer.get_delta_weight("default").double(), expected, atol=1e-5)
        outputs = sum(
            weight[0, k] * torch.cat([second[s, k] for s in range(2)]) @ torch.cat([first[s, k] for s in range(2)]).T
            for k in range(3)
        )
        assert not torch.allclose(expected, 16 / 2 * outputs, atol=1e-2), name

    def test_rounded_gates_pass_the_gradient_of_what_was_rounded(self) -> None:
        logits = torch.tensor([2.0, -2.0], requires_grad=True)
        found = gates(logits, rounded=True)
        assert found.tolist() == [1, 0]
        found.sum().backward()
        soft = torch.sigmoid(logits.detach())
        assert torch.allclose(logits.grad, soft * (1 - soft))
        # Of skills that are all off, the least so stays.
        assert gates(torch.tensor([[-3.0, -1.0], [1.0, 2.0]]), rounded=True).tolist() == [[0, 1], [1, 1]]


class TestRouting:
    def test_the_first_step_changes_nothing(self) -> None:
        base = tiny_llama()
        assert torch.equal(logits(mhr(copy.deepcopy(base)), tasks=["a", "b", "a"]), logits(base))

    def test_rows_of_different_tasks_say_what_each_says_alone(self) -> None:
        model = stir(mhr())
        mixed = logits(model, tasks=["c", "a", "c"])
        for row, task in enumerate(["c", "a", "c"]):
            alone = logits(model, ROWS[row : row + 1], tasks=[task])
            assert torch.allclose(mixed[row], alone[0], atol=1e-5)
        assert not torch.allclose(logits(model, tasks=["a"] * 3), logits(model, tasks=["b"] * 3), atol=1e-3)
        turned = logits(model, ROWS.flip(0), tasks=["c", "a", "c"])
        assert torch.allclose(turned, logits(model, tasks=["c", "a", "c"]).flip(0), atol=1e-5)

    def test_gradients_of_a_mixed_batch_are_the_sum_over_its_rows(self) -> None:
        model = stir(mhr()).double()
        model(input_ids=ROWS, labels=ROWS, tasks=["c", "a", "c"]).loss.backward()
        whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        model.zero_grad()
        for row, task in enumerate(["c", "a", "c"]):
            rows = ROWS[row : row + 1]
            (model(input_ids=rows, labels=rows, tasks=[task]).loss / 3).backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                # transformers computes norms and positions in float32
                assert torch.allclose(parameter.grad, whole[name], atol=1e-5, rtol=1e-4), name
        assert whole["base_model.mhr_router.default"][1].abs().max() == 0  # nobody's task was b
        assert whole["base_model.mhr_router.default"][0].abs().max() > 0

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("routing", ["sigmoid", "relaxed_bernoulli"])
    def test_recomputed_activations_give_the_same_gradients(self, routing: str, reentrant: bool) -> None:
        found = []
        for recompute in (False, True):
            model = stir(mhr(routing=routing)).double().train()
            if recompute:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
            torch.manual_seed(3)
            model(input_ids=ROWS, labels=ROWS, tasks=["c", "a", "c"]).loss.backward()
            found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        for name, gradient in found[0].items():
            assert torch.allclose(found[1][name], gradient, atol=1e-12, rtol=1e-9), name

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_each_forward_is_computed_again_with_its_own_tasks(self, reentrant: bool) -> None:
        found = []
        for recompute in (False, True):
            model = stir(mhr()).double().train()
            if recompute:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
            first = model(input_ids=ROWS, labels=ROWS, tasks=["c", "a", "c"]).loss
            logits(model, tasks=["b", "b", "b"])
            second = model(input_ids=ROWS, labels=ROWS, tasks=["a", "b", "b"]).loss
            (first + second).backward()
            found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        for name, gradient in found[0].items():
            assert torch.allclose(found[1][name], gradient, atol=1e-12, rtol=1e-9), name

    def test_who_recomputes_without_the_tasks_is_told(self) -> None:
        model = stir(mhr()).train()
        blocks = model.base_model.model.model.layers
        blocks[0] = checkpoint_wrapper(blocks[0])
        loss = model(input_ids=ROWS, labels=ROWS, tasks=TASKS).loss
        with pytest.raises(TrainingError, match="lost the tasks"):
            loss.backward()

    def test_a_batch_leaves_nothing_behind(self) -> None:
        model = stir(mhr()).train()
        model(input_ids=ROWS, labels=ROWS, tasks=TASKS).loss.backward()
        twin = copy.deepcopy(model).eval()
        assert torch.equal(logits(twin, tasks=TASKS), logits(model.eval(), tasks=TASKS))
        with pytest.raises(DataError, match="tasks are not given"):
            model.base_model.model(input_ids=ROWS)
        model.base_model.use_task("b")
        past = model.base_model.model(input_ids=ROWS).logits
        assert torch.allclose(past, logits(model, tasks=["b"] * 3), atol=1e-6)

    @pytest.mark.parametrize("tasks", [["a", "b"], "abc", ["a"] * 6])
    def test_each_row_has_one_task(self, tasks: Any) -> None:
        model = mhr()
        for call in (model, model.generate):
            with pytest.raises(DataError, match="not one task for each row"):
                call(input_ids=ROWS, tasks=tasks)

    def test_each_of_several_adapters_numbers_its_tasks_itself(self) -> None:
        model = stir(mhr())
        model.add_adapter("turned", SkillsConfig(task_type="CAUSAL_LM", **{**SMALL, "tasks": TASKS[::-1]}))  # type: ignore[call-arg]
        twice = stir(mhr(alpha=32))
        with torch.no_grad():
            router = model.base_model.mhr_router
            router["turned"].copy_(router["default"].flip(0))
            for layer in layers_of(model).values():
                for held in (layer.mhr_a, layer.mhr_b):
                    held["turned"].copy_(held["default"])
        model.base_model.set_adapter(["default", "turned"])
        tasks = ["a", "c", "b"]
        assert torch.allclose(logits(model, tasks=tasks), logits(twice, tasks=tasks), atol=1e-5)

    def test_rows_have_no_adapters_of_their_own(self) -> None:
        with pytest.raises(ValueError, match="but tasks"):
            logits(mhr(), tasks=TASKS, adapter_names=["default"] * 3)

    def test_a_layer_that_sees_a_part_of_the_rows_is_named(self) -> None:
        model = stir(mhr())
        layer = next(iter(layers_of(model).values()))
        layer.register_forward_pre_hook(lambda module, given: (given[0][:2],))
        with pytest.raises(TrainingError, match="not see all rows"):
            logits(model, tasks=TASKS)

    def test_beams_and_several_answers_keep_their_rows_task(self) -> None:
        model = stir(mhr())
        options: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False, "num_beams": 3}
        mixed = model.generate(input_ids=ROWS, tasks=["c", "a", "b"], num_return_sequences=2, **options)
        for row, task in enumerate(["c", "a", "b"]):
            alone = model.generate(input_ids=ROWS[row : row + 1], tasks=[task], num_return_sequences=2, **options)
            assert torch.equal(mixed[2 * row : 2 * row + 2], alone)

    def test_sampling_is_off_in_evaluation_and_repeats_with_the_seed(self) -> None:
        model = stir(mhr(routing="relaxed_bernoulli"))
        assert torch.equal(logits(model, tasks=["a"] * 3), logits(model, tasks=["a"] * 3))
        model.train()
        drawn = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            drawn.append(logits(model, tasks=["a"] * 3))
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.allclose(drawn[0], drawn[2], atol=1e-3)

    @pytest.mark.parametrize("routing", ["sigmoid", "straight_through"])
    def test_a_task_that_was_not_trained_is_refused_or_mixes_all_skills_alike(self, routing: str) -> None:
        with pytest.raises(DataError, match="unknown task 'bb'"):
            logits(mhr(tasks=["aa", "b_", "cc"]), tasks=["aa", "bb", "cc"])
        with pytest.raises(DataError, match="tasks are not given"):
            logits(mhr())
        model = stir(mhr(unknown_task="uniform", routing=routing))
        even = stir(mhr(routing="uniform"))
        for name, parameter in even.named_parameters():
            if "mhr_" in name:
                parameter.data = dict(model.named_parameters())[name].data
        assert torch.allclose(logits(model, tasks=["never"] * 3), logits(even), atol=1e-5)

    @pytest.mark.parametrize(("granularity", "routers"), [("linear", 14), ("sublayer", 4), ("block", 2), ("model", 1)])
    def test_what_shares_a_router(self, granularity: str, routers: int) -> None:
        router = mhr(granularity=granularity).base_model.mhr_router["default"]
        assert router.shape == (3, routers, 2, 3)
        assert router.abs().max() <= 1e-3

    def test_one_skill_is_lora_whatever_the_splits(self) -> None:
        from peft import LoraConfig

        model = stir(mhr(n_skills=1, n_splits=4))
        stock = get_peft_model(tiny_llama(), LoraConfig(r=2, lora_alpha=16, target_modules="all-linear"))
        with torch.no_grad():
            for name, layer in layers_of(model).items():
                lora: Any = stock.get_submodule(name)
                lora.lora_A["default"].weight.copy_(layer.mhr_a["default"].reshape(-1, 2).T)
                lora.lora_B["default"].weight.copy_(layer.mhr_b["default"].reshape(-1, 2))
        assert torch.allclose(logits(model.double()), logits(stock.eval().double()), atol=1e-6)
        assert not [name for name, _ in model.named_parameters() if "router" in name]


def test_published_parameter_counts() -> None:
    class Block(nn.Module):
        """Layers of T5-XL: width 2048, gated feed-forward 5120."""

        def __init__(self, attentions: int) -> None:
            super().__init__()
            self.attention = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(4 * attentions))
            self.wi = nn.ModuleList(nn.Linear(2048, 5120, bias=False) for _ in range(2))
            self.wo = nn.Linear(5120, 2048, bias=False)

    class T5(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"model_type": "custom"}
            self.blocks = nn.ModuleList(Block(attentions) for attentions in [1] * 24 + [2] * 24)

    with torch.device("meta"):
        model = T5()
    for splits, router in ((1, 3_456), (64, 221_184)):
        config = SkillsConfig(  # type: ignore[call-arg]
            tasks=["one"], r=1, n_skills=8, n_splits=splits, target_modules=r".*\.(attention\.\d+|wi\.\d+|wo)"
        )
        tuner = SkillsTuner(copy.deepcopy(model), config, "default", low_cpu_mem_usage=True)
        trained = {name: p.numel() for name, p in tuner.named_parameters() if p.requires_grad}
        assert trained.pop("mhr_router.default") == router
        assert len(trained) == 2 * 432
        assert sum(trained.values()) == 17_694_720


class TestAdaptation:
    @pytest.fixture
    def earlier(self, tmp_path: Path) -> Path:
        method = finetune.method("mhr", **SMALL)
        stir(method.attach(tiny_llama()))
        method.save(tmp_path / "earlier")
        return tmp_path / "earlier"

    def attached(self, earlier: Path, adapt: str, **settings: Any) -> tuple[Any, Any]:
        method = finetune.method("mhr", tasks=["new"], start=str(earlier), adapt=adapt, **settings)
        return method, method.attach(tiny_llama())

    def train(self, model: Any, task: str = "new", lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=weight_decay)
        model.train()
        for _ in range(4):
            model(input_ids=ROWS, labels=ROWS, tasks=[task] * 3).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()

    def test_z_trains_the_router_alone_and_keeps_the_earlier_tasks(self, earlier: Path, tmp_path: Path) -> None:
        before = finetune.load(tiny_llama(), earlier)
        method, model = self.attached(earlier, "z")
        assert list(method.trained_parameters()) == ["base_model.mhr_router.default"]
        assert method.summary().trained == 14 * 2 * 3
        first = logits(model, tasks=["new"] * 3)
        self.train(model)
        assert not torch.allclose(logits(model, tasks=["new"] * 3), first, atol=1e-4)
        method.save(tmp_path / "later")
        later = finetune.load(tiny_llama(), tmp_path / "later")
        for task in TASKS:
            assert torch.equal(logits(later, tasks=[task] * 3), logits(before, tasks=[task] * 3))
        assert torch.equal(logits(later, tasks=["new"] * 3), logits(model, tasks=["new"] * 3))
        again = finetune.method("mhr", tasks=["newer"], start=str(tmp_path / "later"), adapt="z")
        third = again.attach(tiny_llama()).eval()
        assert torch.equal(logits(third, tasks=["new", "a", "b"]), logits(later, tasks=["new", "a", "b"]))

    def test_full_trains_the_earlier_skills_with_a_fresh_router(self, earlier: Path) -> None:
        method, model = self.attached(earlier, "full")
        even = finetune.method("mhr", **{**SMALL, "routing": "uniform"}).attach(tiny_llama())
        stir(even)
        assert torch.allclose(logits(model.eval()), logits(even), atol=1e-2)  # logits near zero
        assert method.summary().trained == sum(p.numel() for n, p in model.named_parameters() if "mhr_" in n)

    def test_the_mean_of_the_skills_trains_as_all_of_them_mixed_alike_do_under_adam(self, earlier: Path) -> None:
        method, mean = self.attached(earlier, "mu")
        whole = stir(finetune.method("mhr", **{**SMALL, "routing": "uniform"}).attach(tiny_llama()))
        mean.double(), whole.double()
        assert torch.allclose(logits(mean.eval()), logits(whole), atol=1e-5)
        for model in (mean, whole):
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.Adam(trained, lr=1e-2, eps=1e-30)
            for _ in range(4):
                model(input_ids=ROWS, labels=ROWS).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert torch.allclose(logits(mean), logits(whole), atol=1e-4)
        stock = sum(2 * (layer.in_features + layer.out_features) for layer in layers_of(mean).values())
        assert method.summary().trained == stock

    def test_what_does_not_fit_the_earlier_run_is_refused(self, earlier: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="trained with another value"):
            self.attached(earlier, "full", n_skills=4)
        with pytest.raises(ConfigError, match="nothing to adapt"):
            finetune.method("mhr", adapt="z")
        with pytest.raises(ConfigError, match="has trained this task"):
            finetune.method("mhr", tasks=["a"], start=str(earlier), adapt="z")
        with pytest.raises(CheckpointError, match="is missing"):
            finetune.method("mhr", start=str(tmp_path))
        for target in ("q_proj", ["q_proj", "v_proj"]):
            with pytest.raises((CheckpointError, TargetError), match=r"other layers|no module matches"):
                self.attached(earlier, "full", target_modules=target)
        other = tiny_llama()
        with torch.no_grad():
            other.lm_head.weight.add_(1.0)
        with pytest.raises(CheckpointError, match="another base"):
            finetune.method("mhr", tasks=["new"], start=str(earlier)).attach(other)
        assert finetune.method("mhr", tasks=["new"], start=str(earlier)).attach(tiny_llama(meta=True))

    def test_the_earlier_run_says_which_layers(self, tmp_path: Path) -> None:
        some = {**SMALL, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1], "r": 3}
        earlier = finetune.method("mhr", **some)
        stir(earlier.attach(tiny_llama()))
        earlier.save(tmp_path)
        for adapt in ("full", "z", "mu"):
            method = finetune.method("mhr", tasks=["new"], start=str(tmp_path), adapt=adapt)
            model = method.attach(tiny_llama())
            assert sorted(layers_of(model)) == sorted(layers_of(earlier.model))
            assert method.metadata()["config"]["r"] == 3

    def test_what_had_no_gates_or_more_than_skills_is_refused(self, tmp_path: Path) -> None:
        for name, changes in (("even", {"routing": "uniform"}), ("whole", {"modules_to_save": ["lm_head"]})):
            method = finetune.method("mhr", **{**SMALL, **changes})
            method.attach(tiny_llama())
            method.save(tmp_path / name)
        with pytest.raises(ConfigError, match="no gates to train"):
            finetune.method("mhr", tasks=["new"], start=str(tmp_path / "even"), adapt="z")
        with pytest.raises(CheckpointError, match="would be lost"):
            finetune.method("mhr", tasks=["new"], start=str(tmp_path / "whole"))


class TestLifeInPeft:
    def test_saved_loaded_and_automatic(self, tmp_path: Path) -> None:
        base = save_tiny_model(tmp_path / "base")
        model = stir(mhr(LlamaForCausalLM.from_pretrained(base)))
        expected = logits(model, tasks=TASKS)
        model.save_pretrained(tmp_path / "adapter")
        for low in (False, True):
            loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapter", low_cpu_mem_usage=low)
            assert torch.equal(logits(loaded.eval(), tasks=TASKS), expected)
        automatic = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
        assert torch.equal(logits(automatic, tasks=TASKS), expected)

    def test_several_adapters_switched_and_deleted(self) -> None:
        model = stir(mhr())
        first = logits(model, tasks=TASKS)
        model.add_adapter("second", SkillsConfig(task_type="CAUSAL_LM", **{**SMALL, "r": 1, "tasks": ["x", "y"]}))  # type: ignore[call-arg]
        assert torch.equal(logits(model, tasks=TASKS), first)
        model.set_adapter("second")
        assert torch.equal(logits(model, tasks=["x", "x", "y"]), logits(tiny_llama()))
        model.delete_adapter("second")
        model.set_adapter("default")
        assert torch.equal(logits(model, tasks=TASKS), first)
        with model.disable_adapter():
            assert torch.equal(logits(model, tasks=TASKS), logits(tiny_llama()))

    @pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
    def test_one_task_is_merged_exported_and_converted(self, build: Any, tmp_path: Path) -> None:
        method = finetune.method("mhr", **SMALL)
        model = stir(method.attach(build()))
        with pytest.raises(CapabilityError, match="serve one task"):
            method.merge()
        with pytest.raises(CapabilityError, match="serve one task"):
            method.export_adapter(tmp_path / "lora")
        method.use_task("b")
        expected = logits(model, tasks=["b"] * 3)
        assert torch.equal(logits(model), expected)
        method.export_adapter(tmp_path / "lora")
        stock = PeftModel.from_pretrained(build(), tmp_path / "lora").eval()
        assert torch.allclose(logits(stock), expected, atol=1e-5)
        if build is tiny_llama:
            converted, _ = convert_to_lora(model, rank=2)
            assert converted.r == 2
        assert torch.allclose(logits(method.merge()), expected, atol=1e-5)

    def test_a_16_bit_base_keeps_float32_skills(self) -> None:
        method = finetune.method("mhr", **SMALL)
        model = method.attach(tiny_llama(dtype=torch.bfloat16))
        assert {p.dtype for p in method.trained_parameters().values()} == {torch.float32}
        assert logits(model, tasks=TASKS).dtype == torch.bfloat16


def test_bad_settings_are_named() -> None:
    with pytest.raises(TargetError, match=r"5 splits do not divide the width 32 of model\.layers\.0"):
        mhr(n_splits=5)
    with pytest.raises(ConfigError, match="no task to train"):
        mhr(tasks=[])
    with pytest.raises(ConfigError, match="named twice"):
        mhr(tasks=["a", "a"])
    with pytest.raises(ValueError, match="no name for an adapter"):
        get_peft_model(tiny_llama(), SkillsConfig(**SMALL), adapter_name="mhr")  # type: ignore[call-arg,arg-type]


def test_single_examples_keep_their_task() -> None:
    batch = {"input_ids": ROWS, "labels": ROWS, "tasks": TASKS}
    assert [row["tasks"] for row in single_examples([batch])] == [["a"], ["b"], ["c"]]
