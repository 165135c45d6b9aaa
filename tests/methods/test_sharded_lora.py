"""MoS and its relatives: the worked example, published counts, and PEFT's whole life of an adapter."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel, convert_to_lora, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import finetune
from finetune.core.errors import CapabilityError, FinetuneError, TargetError
from finetune.methods.primitives.peft_registration import register_tuner
from finetune.methods.primitives.shard_layer import LinearShards
from finetune.methods.primitives.shard_tuner import SHARDS, ShardsConfig, ShardsTuner
from support.processes import one_and_two_processes
from support.tiny import save_tiny_model, tiny_gpt2, tiny_llama, token_batch

ROWS = token_batch(3, 12)
SMALL = {"r": 4, "equiv_rank": 2, "private_rank": 1, "num_shards": 2, "target_modules": "all-linear"}


def mos(model: Any = None, **changes: Any) -> Any:
    config = ShardsConfig(task_type="CAUSAL_LM", **{**SMALL, **changes})  # type: ignore[call-arg]
    return get_peft_model(tiny_llama(layers=4) if model is None else model, config)


def train(model: Any, steps: int = 3) -> Any:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for _ in range(steps):
        model(input_ids=ROWS, labels=ROWS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def logits(model: Any, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ROWS, **options).logits
    return found


def layers_of(model: Any) -> dict[str, LinearShards]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LinearShards)}


class TestWorkedExample:
    def layer(self) -> tuple[LinearShards, Any]:
        class Owner(nn.Module):
            seen_outside_backward = False

            def gathered(self, adapter: str, group: str, place: int) -> None:
                return None

        owner = Owner()
        pools = {"a": [[1.0, 2], [3, 4], [5, 6], [7, 8]], "b": [[1.0, 0], [0, 1], [2, 0], [0, 2]]}
        for name, rows in pools.items():
            pool = nn.ParameterDict({"g": nn.Parameter(torch.tensor(rows))})
            setattr(owner, f"shards_pool_{name}", nn.ModuleDict({"default": pool}))
        base = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(base.weight)
        layer = LinearShards(base, owner)
        layer._active_adapter = ["default"]
        first, second = (torch.tensor(rows, dtype=torch.int32) for rows in ([[2, 0], [1, 3]], [[0, 1], [3, 2]]))
        layer.update_layer("default", "g", 0, first, second, factors=None, alpha=2, dropout=0.0, inference_mode=False)
        return layer, owner

    def test_factors_change_output_and_gradients(self) -> None:
        layer, owner = self.layer()
        first, second = layer.factors("default", torch.float32)
        assert first.tolist() == [[5, 6, 1, 2], [3, 4, 7, 8]]
        assert second.tolist() == [[1, 0, 0, 1], [0, 2, 2, 0]]
        expected = [[5, 6, 1, 2], [6, 8, 14, 16], [6, 8, 14, 16], [5, 6, 1, 2]]
        assert layer.get_delta_weight("default").tolist() == expected
        y = layer(torch.ones(1, 4))
        assert y.tolist() == [[14, 44, 44, 14]]
        y.sum().backward()
        assert owner.shards_pool_a["default"]["g"].grad.tolist() == [[2, 2], [4, 4], [2, 2], [4, 4]]
        assert owner.shards_pool_b["default"]["g"].grad.tolist() == [[14, 14], [14, 14], [22, 22], [22, 22]]

    def test_merging_and_taking_off_again(self) -> None:
        layer, _ = self.layer()
        layer.merge(safe_merge=True)
        assert layer(torch.ones(1, 4)).tolist() == [[14, 44, 44, 14]]
        layer.unmerge()
        assert layer.base_layer.weight.abs().max() == 0


_LLAMA2_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
_LLAMA2_13B = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}
_LLAMA3_8B = {**_LLAMA2_7B, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}


@pytest.mark.parametrize(
    ("sizes", "budget", "trained"),
    [
        (_LLAMA2_7B, 2, 4_997_120),
        (_LLAMA2_7B, 8, 19_988_480),
        (_LLAMA2_7B, 16, 39_976_960),
        (_LLAMA2_7B, 64, 159_907_840),
        (_LLAMA2_13B, 2, 7_823_360),
        (_LLAMA3_8B, 2, 5_242_880),
    ],
)
def test_published_parameter_counts(sizes: dict[str, int], budget: int, trained: int) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    for private in (0, 1):
        method = finetune.method("mos", r=2 * budget, equiv_rank=budget, private_rank=private, num_shards=4)
        method.attach(copy.deepcopy(model))
        assert method.summary().trained == trained
    method = finetune.method("pure_sharing", equiv_rank=budget)
    method.attach(model)
    assert method.summary().trained == trained


def test_prolora_trains_what_its_formula_says() -> None:
    method = finetune.method("prolora", r=6, unshared_rank=2, num_shards=4, num_shards_b=2, target_modules=["up_proj"])
    method.attach(tiny_llama(layers=3))
    assert method.summary().trained == 3 * (4 * (32 // 4 + 48 // 2) + 2 * (32 + 48))


def test_the_first_step_changes_nothing_and_gives_gradients_to_the_second_factor_only() -> None:
    base = tiny_llama(layers=4)
    model = mos(copy.deepcopy(base))
    assert torch.equal(logits(model), logits(base))
    model(input_ids=ROWS, labels=ROWS).loss.backward()
    for name, parameter in model.named_parameters():
        if "shards_pool_a" in name:
            assert parameter.grad.abs().max() == 0
        elif "shards_pool_b" in name:
            assert (parameter.grad.abs().amax(1) > 0).all()  # balanced: every shard is used


def test_the_two_factors_are_dealt_apart_unless_asked_and_begin_within_the_bound_of_a_whole_vector() -> None:
    for dissociated in (True, False):
        for layer in layers_of(mos(dissociated=dissociated)).values():
            same = torch.equal(layer.shards_index_a["default"], layer.shards_index_b["default"])
            assert same is not dissociated
            bound = layer.in_features**-0.5
            assert 0.8 * bound < layer.shards_pool_a["default"].abs().max() <= bound


def test_shards_belong_to_their_layers_alone_or_to_all_that_draw_them() -> None:
    model = train(mos())
    layers = [layer for name, layer in layers_of(model).items() if name.endswith("q_proj")]
    before = [layer.get_delta_weight("default") for layer in layers]
    pool, index = layers[0].shards_pool_b["default"], layers[0].shards_index_b["default"]
    with torch.no_grad():
        pool[index[-1]] += 1.0  # private to the first layer
    after = [layer.get_delta_weight("default") for layer in layers]
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [False, True, True, True]
    assert all(int(torch.linalg.matrix_rank(delta)) <= 4 for delta in after)


class TestLifeInPeft:
    @pytest.mark.parametrize("low", [False, True])
    def test_saved_and_loaded_bit_for_bit(self, tmp_path: Path, low: bool) -> None:
        base = tiny_llama(layers=4)
        model = train(mos(copy.deepcopy(base)))
        model.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "adapter_model.safetensors")
        pools = [key for key in tensors if "shards_pool" in key]
        assert len(pools) == 14
        assert all(key.count("base_model") == 1 for key in pools)
        numbers = sum(tensor.numel() for tensor in tensors.values())
        assert numbers == 3712 + 2 * 4 * 2 * 28  # e U, and 2 r l integers per layer
        loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, low_cpu_mem_usage=low).eval()
        assert torch.equal(logits(loaded), logits(model))
        assert PeftConfig.from_pretrained(tmp_path).peft_type == SHARDS

    def test_found_by_the_auto_class_in_a_new_process(self, tmp_path: Path) -> None:
        base = save_tiny_model(tmp_path / "base", layers=4)
        model = train(mos(LlamaForCausalLM.from_pretrained(base)))
        model.save_pretrained(tmp_path / "adapter")
        script = (
            "import sys, torch, finetune.peft\nfrom peft import AutoPeftModelForCausalLM\n"
            "model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1]).eval()\n"
            "torch.save(model(input_ids=torch.load(sys.argv[2])).logits.detach(), sys.argv[3])\n"
        )
        torch.save(ROWS, tmp_path / "rows.pt")
        paths = [str(tmp_path / name) for name in ("adapter", "rows.pt", "out.pt")]
        subprocess.run([sys.executable, "-c", script, *paths], check=True, capture_output=True)
        assert torch.equal(torch.load(tmp_path / "out.pt"), logits(model))
        assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()), logits(model))

    def test_several_adapters_switched_deleted_mixed_in_a_batch(self) -> None:
        base = tiny_llama(layers=4)
        model = train(mos(copy.deepcopy(base)))
        first = logits(model)
        index = {name: layer.shards_index_a["default"].clone() for name, layer in layers_of(model).items()}
        model.add_adapter(
            "other", ShardsConfig(**{**SMALL, "r": 2, "seed": 7, "num_shards": 1, "target_modules": ["q_proj"]})
        )
        assert torch.equal(logits(model), first)
        model.set_adapter("other")
        train(model)
        second = logits(model)
        assert not torch.equal(first, second)
        mixed = logits(model, adapter_names=["other", "__base__", "default"])
        for row, alone in enumerate((second, logits(base), first)):
            assert torch.allclose(mixed[row], alone[row], atol=1e-5)
        untouched = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match="nobody"):
            logits(model, adapter_names=["nobody", "other", "other"])
        with pytest.raises(ValueError, match="2 adapter_names for 3 rows"):
            logits(model, adapter_names=["other", "default"])
        options: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False, "num_beams": 3}
        names = ["other", "__base__", "default"]
        several = model.generate(input_ids=ROWS[:3], adapter_names=names, num_return_sequences=2, **options)
        for row, name in enumerate(names):
            alone = model.generate(
                input_ids=ROWS[row : row + 1], adapter_names=[name], num_return_sequences=2, **options
            )
            assert torch.equal(several[2 * row : 2 * row + 2], alone)
        model.merge_adapter(["default"])
        with pytest.raises(ValueError, match="is merged"):
            logits(model, adapter_names=["default"] * 3)
        model.unmerge_adapter()
        model.load_state_dict(untouched)
        with model.disable_adapter():
            assert torch.equal(logits(model), logits(base))
        model.delete_adapter("other")
        assert torch.equal(logits(model), first)
        assert list(model.base_model.shards_pool_a) == ["default"]
        assert all(torch.equal(layer.shards_index_a["default"], index[n]) for n, layer in layers_of(model).items())

    def test_copies_share_pools_among_themselves_only(self) -> None:
        model = train(mos())
        twin = copy.deepcopy(model)
        assert torch.equal(logits(twin), logits(model))
        before = logits(model)
        train(twin)
        assert torch.equal(logits(model), before)
        assert not torch.equal(logits(twin), before)
        assert pickle.loads(pickle.dumps(model.peft_config["default"])).r == 4

    @pytest.mark.parametrize("build", [lambda: tiny_llama(layers=4), tiny_gpt2])
    @pytest.mark.parametrize(
        "own",
        [
            {},
            {"dissociated": False},
            {"sharing": "prolora"},
            {"sharing": "pure", "random_scaling": 0.5, "subset": False},
        ],
    )
    def test_merged_and_converted(self, build: Any, own: dict[str, Any]) -> None:
        model = train(mos(build(), **{"r": 2, **own}))
        expected = logits(model)
        converted, _ = convert_to_lora(copy.deepcopy(model), rank=16)
        assert converted.peft_type == "LORA"
        assert torch.allclose(logits(model.merge_and_unload()), expected, atol=1e-5)

    def test_a_bfloat16_base_has_float32_pools_and_keeps_its_dtype(self) -> None:
        model = mos(tiny_llama(layers=4, dtype=torch.bfloat16))
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        assert logits(train(model)).dtype == torch.bfloat16

    def test_names_that_peft_would_take_for_its_own_and_widths_that_do_not_divide(self) -> None:
        config = ShardsConfig(task_type="CAUSAL_LM", **SMALL)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no name for an adapter"):
            get_peft_model(tiny_llama(layers=4), config, adapter_name="shard")
        with pytest.raises(
            TargetError, match=r"5 shards do not divide the width 32 of model\.layers\.0\.self_attn\.q_proj"
        ):
            mos(num_shards=5)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_laid_out_for_the_whole_model_at_once_the_gradients_are_the_same(
    dtype: torch.dtype, reentrant: bool | None
) -> None:
    found = []
    for gather in ("layer", "model"):
        model = train(mos(tiny_llama(layers=4, dtype=dtype), gather=gather), steps=1).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        for _ in range(2):  # accumulation takes a fresh graph each
            model(input_ids=ROWS, labels=ROWS).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        assert torch.equal(logits(copy.deepcopy(model).eval()), logits(model.eval()))
    assert found[0]
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype is torch.float64 else {"atol": 1e-2, "rtol": 2e-2}
    for name, gradient in found[0].items():
        assert torch.allclose(found[1][name], gradient, **tolerance), name


@pytest.mark.parametrize("gather", ["layer", "model"])
def test_it_compiles_without_a_graph_break(gather: str) -> None:
    model = train(mos(gather=gather), steps=1).train()
    expected = model(input_ids=ROWS, labels=ROWS).loss
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = torch.compile(model, backend="eager", fullgraph=True)(input_ids=ROWS, labels=ROWS).loss
    loss.backward()
    assert torch.allclose(loss, expected, atol=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(model.get_parameter(name).grad, gradient, atol=1e-6), name


def test_factors_are_kept_in_evaluation_until_the_pools_change() -> None:
    model = train(mos()).eval()
    layer = next(iter(layers_of(model).values()))
    before = logits(model)
    layer.shards_pool_b["default"].data.add_(1.0)  # leaves no trace
    assert not torch.equal(logits(model), before)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        first = layer.factors("default", torch.float32)
        assert layer.factors("default", torch.float32)[0] is first[0]
        assert layer.factors("default", torch.bfloat16)[0].dtype == torch.bfloat16
    before = logits(model)
    with torch.no_grad():
        layer.shards_pool_b["default"].add_(1.0)
    assert not torch.equal(logits(model), before)


def test_a_stock_lora_says_the_same(tmp_path: Path) -> None:
    for name, config in (
        ("mos", {"r": 3, "equiv_rank": 2, "private_rank": 1, "num_shards": 2}),
        ("pure_sharing", {"equiv_rank": 1, "random_scaling": 0.3}),
        ("prolora", {"r": 4, "num_shards": 2}),
    ):
        base = tiny_llama()
        method = finetune.method(name, **config)
        model = train(method.attach(copy.deepcopy(base)))
        method.export_adapter(tmp_path / name)
        assert json.loads((tmp_path / name / "adapter_config.json").read_text())["peft_type"] == "LORA"
        stock = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name).eval()
        # In float64, so that no kernel's order of summing shows: what differs is one rounding of factor times row.
        assert torch.allclose(logits(stock.double()), logits(model.double()), atol=1e-6, rtol=0)


def test_dead_shards_are_reported() -> None:
    method = finetune.method("mos", dealing="random", r=8, equiv_rank=8, private_rank=0, num_shards=1)
    method.attach(tiny_llama(layers=8))
    assert any("used by no layer" in line for line in method.summary().chosen)
    method = finetune.method("mos", r=8, equiv_rank=8, private_rank=0, num_shards=1)
    method.attach(tiny_llama(layers=8))
    assert not any("used by no layer" in line for line in method.summary().chosen)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"r": 4, "equiv_rank": 8}, "does not hold"),
        ({"private_rank": 9}, "does not hold"),
        ({"r": 16, "equiv_rank": 8, "private_rank": 8}, "r is equiv_rank"),
        ({"r": 3, "equiv_rank": 2, "private_rank": 1, "num_shards": 7}, "7 shards do not divide"),
        ({"r": 32, "equiv_rank": 8, "private_rank": 2}, "a smaller r, or a larger equiv_rank"),
    ],
)
def test_ranks_that_do_not_fit(config: dict[str, Any], part: str) -> None:
    with pytest.raises(FinetuneError) as caught:
        finetune.method("mos", **config).attach(tiny_llama())
    assert part in str(caught.value)


def test_registering_is_idempotent_and_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import PeftType

    assert register_tuner("shards", ShardsConfig, ShardsTuner) is SHARDS
    assert PeftType("SHARDS") is SHARDS
    assert pickle.loads(pickle.dumps(SHARDS)) is SHARDS
    assert [member for member in PeftType if member == "SHARDS"] == [SHARDS]
    with pytest.raises(CapabilityError, match="of its own"):
        register_tuner("lora", ShardsConfig, ShardsTuner)


SCRIPT = """
import torch
from torch.nn.parallel import DistributedDataParallel
import finetune
from finetune.core.errors import TrainingError
from support.distributed import distributed, own_rows, save_results, shard, whole_parameters
from support.tiny import tiny_llama, token_batch

results = {}
for wrapper in ("ddp", "fsdp2"):
    for recompute in (False, True):
        method = finetune.method("mos", r=4, equiv_rank=2, private_rank=1, num_shards=2)
        model = method.attach(tiny_llama(layers=4))
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        network = model.train()
        if distributed and wrapper == "ddp":
            network = DistributedDataParallel(model)
        else:
            shard(model, model.base_model.model.model.layers)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        for step in range(4):
            mine = own_rows(step)
            network(input_ids=mine, labels=mine).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results[f"{wrapper} {recompute}"] = whole_parameters(model)
if distributed:
    method = finetune.method("mos", r=4, equiv_rank=2, private_rank=1, num_shards=2)
    model = method.attach(tiny_llama(layers=4))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    try:
        rows = token_batch(2, 10)
        DistributedDataParallel(model.train())(input_ids=rows, labels=rows).loss.backward()
    except TrainingError as error:
        assert "use_reentrant" in str(error)
    else:
        raise AssertionError("reentrant recomputation was not refused")
save_results(results)
"""


@pytest.mark.multi_process
@pytest.mark.integration
def test_two_processes_equal_one_and_reentrant_recomputation_is_refused(tmp_path: Path) -> None:
    one, two = one_and_two_processes(tmp_path, SCRIPT)
    for case, parameters in one.items():
        assert any(tensor.abs().max() > 0 for name, tensor in parameters.items() if "pool_b" in name)
        for name, tensor in parameters.items():
            assert torch.allclose(two[case][name], tensor, atol=1e-6, rtol=1e-5), (case, name)
