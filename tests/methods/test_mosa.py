"""MoSA against a dense reference that keeps whole copies and masks, and PEFT's whole life of an adapter."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, convert_to_lora, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import finetune
from finetune.core.errors import FinetuneError, TrainingError
from finetune.methods.primitives.mosa_layer import MosaLinear
from finetune.methods.primitives.mosa_tuner import MosaConfig
from finetune.methods.primitives.sparse_experts import SparseExperts
from support.tiny import save_tiny_model, tiny_gpt2, tiny_llama, token_batch

ROWS = token_batch(3, 12)
SMALL = {"r": 4, "n_experts": 3, "target_modules": ["q_proj", "down_proj"]}


def mosa(model: Any = None, **changes: Any) -> Any:
    config = MosaConfig(task_type="CAUSAL_LM", **{**SMALL, **changes})  # type: ignore[call-arg]
    return get_peft_model(tiny_llama() if model is None else model, config)


def train(model: Any, steps: int = 3, **options: Any) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **{"lr": 1e-2, "weight_decay": 0.1, **options})
    model.train()
    for step in range(steps):
        rows = token_batch(3, 12, seed=step)
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=ROWS).logits
    return found


def matrices(model: Any) -> dict[str, SparseExperts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseExperts)}


class TestExperts:
    @pytest.mark.parametrize(("entries", "experts"), [(12, 1), (12, 2), (100, 3), (98, 49), (101, 49), (7, 7)])
    def test_own_every_entry_once_in_sets_of_one_size(self, entries: int, experts: int) -> None:
        matrix = SparseExperts(torch.randn(1, entries), experts, torch.Generator().manual_seed(0))
        sets = [matrix.index(expert).tolist() for expert in range(experts)]
        assert sorted(entry for own in sets for entry in own) == list(range(entries))
        assert max(map(len, sets)) - min(map(len, sets)) <= 1
        assert sum(p.numel() for p in matrix.parameters()) == entries

    def test_begin_equal_and_differ_in_their_own_entries_only(self) -> None:
        initial = torch.randn(4, 5)
        matrix = SparseExperts(initial, 3, torch.Generator().manual_seed(0))
        assert torch.equal(matrix.merged(), initial)
        for expert in range(3):
            assert torch.equal(matrix.drawn(expert), initial)
            with torch.no_grad():
                matrix.values(expert).add_(1.0)
            expected = initial.clone().view(-1)
            expected[matrix.index(expert)] += 1
            assert torch.equal(matrix.drawn(expert), expected.view(4, 5))

    @pytest.mark.parametrize("initial", [torch.zeros(2, 2), torch.tensor([[1.0, 0], [-1, 2]])])
    def test_merged_are_the_initial_matrix_and_their_changes_over_their_number(self, initial: Tensor) -> None:
        matrix = SparseExperts(initial, 2, torch.Generator())
        matrix.order = torch.tensor([0, 3, 1, 2], dtype=torch.int32)
        changes = (torch.tensor([[2.0, 0], [0, 4]]), torch.tensor([[0.0, 6], [8, 0]]))
        with torch.no_grad():
            for expert, change in enumerate(changes):
                matrix.values(expert).copy_((initial + change).view(-1)[matrix.index(expert)])
        assert torch.equal(matrix.merged() - initial, torch.tensor([[1.0, 3], [4, 2]]))
        assert torch.equal((matrix.drawn(0) + matrix.drawn(1)) / 2, matrix.merged())

    def test_more_than_entries_are_refused(self) -> None:
        method = finetune.method("mosa", r=1, n_experts=33, target_modules=["q_proj"])
        with pytest.raises(FinetuneError, match="more experts than entries") as caught:
            method.attach(tiny_llama())
        assert "at most 32" in str(caught.value)


class DenseReference(nn.Module):
    """Whole copies of both factors per expert, and masks: what the compact form stands for."""

    def __init__(self, layer: MosaLinear) -> None:
        super().__init__()
        self.base, self.scale, self.draw = layer.base_layer, layer.scaling["default"], (0, 0)
        self.copies, self.masks = nn.ModuleList(), []
        for experts in (layer.mosa_a["default"], layer.mosa_b["default"]):
            assert isinstance(experts, SparseExperts)
            wholes = [experts.drawn(expert).detach().clone() for expert in range(experts.experts)]
            self.copies.append(nn.ParameterList(map(nn.Parameter, wholes)))
            masks = torch.zeros(experts.experts, wholes[0].numel())
            for expert in range(experts.experts):
                masks[expert, experts.index(expert)] = 1
            self.masks.append(masks.view(-1, *wholes[0].shape))
        self.initial = [[copied.detach().clone() for copied in factor] for factor in self.copies]  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        a, b = (factor[drawn] for factor, drawn in zip(self.copies, self.draw, strict=True))  # type: ignore[index]
        y: Tensor = self.base(x) + self.scale * F.linear(F.linear(x, a), b)
        return y

    def pin(self, *, gradients: bool) -> None:
        """Holds what an expert does not own, its gradient or its value, where it was."""
        for factor, masks, initials in zip(self.copies, self.masks, self.initial, strict=True):
            for copied, mask, initial in zip(factor, masks, initials, strict=True):  # type: ignore[arg-type]
                if gradients and copied.grad is not None:
                    copied.grad.mul_(mask)
                elif not gradients:
                    copied.data = torch.where(mask.bool(), copied.data, initial)


def drawn(seed: int, forward: int, number: int, layer: str, factor: str, experts: int) -> int:
    digest = hashlib.sha256(f"{seed} {forward} {number} {layer} {factor}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % experts


def divergence(p: Tensor, q: Tensor) -> Tensor:
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    toward_q = (log_q.detach().exp() * (log_q.detach() - log_p)).sum(-1)
    toward_p = (log_p.detach().exp() * (log_p.detach() - log_q)).sum(-1)
    return (toward_q + toward_p) / 2


@pytest.mark.parametrize(("split", "beta", "gamma"), [("up", 0.0, 1.0), ("down", 0.5, 0.0), ("both", 0.5, 2.0)])
def test_thirty_steps_of_adamw_equal_those_of_dense_copies_and_masks(split: str, beta: float, gamma: float) -> None:
    model = mosa(split=split, beta=beta, gamma=gamma, seed=5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mosa_b" in name:
                # From zero both passes would agree but for rounding, of whose sign Adam would make a whole step.
                parameter.normal_(std=0.1)
    dense = copy.deepcopy(model).base_model.model
    references = {}
    for name, layer in list(dense.named_modules()):
        if isinstance(layer, MosaLinear):
            references[name] = DenseReference(layer)
            dense.set_submodule(name, references[name])
    copies = [parameter for reference in references.values() for parameter in reference.copies.parameters()]
    optimizer = torch.optim.AdamW(copies, lr=1e-2, weight_decay=0.1)
    for step in range(30):
        rows = token_batch(3, 12, seed=step)
        passes = []
        for number in range(2):
            for name, reference in references.items():
                counts = [len(factor) for factor in reference.copies]  # type: ignore[arg-type]
                reference.draw = tuple(  # type: ignore[assignment]
                    drawn(5, step, number, name, factor, count) for factor, count in zip("ab", counts, strict=True)
                )
            passes.append(dense(input_ids=rows).logits[:, :-1])
        p, q = passes
        target = rows[:, 1:].flatten()
        cross = [F.cross_entropy(each.flatten(0, 1), target) for each in passes]
        (cross[0] + beta * cross[1] + gamma * divergence(p, q).mean()).backward()
        for pin in (reference.pin for reference in references.values()):
            pin(gradients=True)
        optimizer.step()
        optimizer.zero_grad()
        for pin in (reference.pin for reference in references.values()):
            pin(gradients=False)
    train(model, 30)
    compact = {n: m for n, m in model.base_model.model.named_modules() if isinstance(m, MosaLinear)}
    for name, reference in references.items():
        for factor, experts in zip(reference.copies, (compact[name].mosa_a, compact[name].mosa_b), strict=True):
            for expert, copied in enumerate(factor):  # type: ignore[arg-type]
                # Thirty steps of 1e-2 move an entry by up to 0.3; the loss is summed in another order.
                torch.testing.assert_close(experts["default"].drawn(expert), copied.detach(), atol=2e-5, rtol=1e-4)


def test_one_expert_and_one_pass_are_plain_lora() -> None:
    model = mosa(n_experts=1, gamma=0.0)
    lora: Any = get_peft_model(tiny_llama(), LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"]))
    ours = {n: m for n, m in model.named_modules() if isinstance(m, MosaLinear)}
    with torch.no_grad():
        for name, layer in ours.items():
            stock = lora.get_submodule(name)
            stock.lora_A["default"].weight.copy_(layer.plain_factors("default")[0])
    assert torch.allclose(logits(train(model, 10)), logits(train(lora, 10)), atol=1e-5)


def test_an_expert_that_rests_is_not_moved_by_momentum_or_decay() -> None:
    model = mosa(gamma=0.0, split="both").train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.5)
    rested = 0
    for _ in range(6):
        before = {name: p.detach().clone() for name, p in model.named_parameters() if "expert_" in name}
        model(input_ids=ROWS, labels=ROWS).loss.backward()
        resting = {name for name, p in model.named_parameters() if "expert_" in name and p.grad is None}
        assert len(resting) == 2 * len(matrices(model))
        optimizer.step()
        optimizer.zero_grad()
        moved = {name for name, p in model.named_parameters() if name in before and not torch.equal(p, before[name])}
        assert not moved & resting
        rested += sum(bool(optimizer.state.get(model.get_parameter(name))) for name in resting)
    assert rested > 0  # some of them had momentum


class TestLifeInPeft:
    @pytest.mark.parametrize("low", [False, True])
    def test_saved_and_loaded_bit_for_bit(self, tmp_path: Path, low: bool) -> None:
        base = tiny_llama()
        model = train(mos := mosa(copy.deepcopy(base), split="both"))
        model.save_pretrained(tmp_path)
        loaded: Any = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, low_cpu_mem_usage=low, is_trainable=True)
        assert torch.equal(logits(loaded.eval()), logits(model))
        assert loaded.base_model.mosa_forwards["default"].value == 3
        assert torch.equal(logits(train(loaded)), logits(train(mos)))
        size = (tmp_path / "adapter_model.safetensors").stat().st_size
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert size < 4 * 3 * trained + 16_000  # values, whose they are, where the first factor began, and a header

    def test_a_new_process_loads_it_after_one_import_and_its_export_without_any(self, tmp_path: Path) -> None:
        base = save_tiny_model(tmp_path / "base")
        method = finetune.method("mosa", r=4, n_experts=3, split="both")
        model = train(method.attach(LlamaForCausalLM.from_pretrained(base)))
        cast_model: Any = model
        cast_model.save_pretrained(tmp_path / "native")
        method.export_adapter(tmp_path / "stock")
        assert json.loads((tmp_path / "stock/adapter_config.json").read_text())["peft_type"] == "LORA"
        script = (
            "import sys, torch\nfrom peft import AutoPeftModelForCausalLM\nassert 'finetune' not in sys.modules\n"
            "model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1]).eval()\n"
            "torch.save(model(input_ids=torch.load(sys.argv[2])).logits.detach(), sys.argv[3])\n"
        )
        torch.save(ROWS, tmp_path / "rows.pt")
        ours = script.replace("assert 'finetune' not in sys.modules", "import finetune.peft")
        for name, source in (("native", ours), ("stock", script)):
            paths = [str(tmp_path / part) for part in (name, "rows.pt", "out.pt")]
            subprocess.run([sys.executable, "-c", source, *paths], check=True, capture_output=True)
            assert torch.allclose(torch.load(tmp_path / "out.pt"), logits(model), atol=1e-6, rtol=0)

    def test_several_adapters_switched_and_deleted(self) -> None:
        base = tiny_llama()
        model = train(mosa(copy.deepcopy(base)))
        first = logits(model)
        model.add_adapter("other", MosaConfig(**{**SMALL, "r": 2, "n_experts": 2, "seed": 7}))
        assert torch.equal(logits(model), first)
        model.set_adapter("other")
        train(model)
        assert not torch.equal(logits(model), first)
        with model.disable_adapter():
            assert torch.equal(logits(model), logits(base))
        assert {name: count.value for name, count in model.base_model.mosa_forwards.items()} == {
            "default": 3,
            "other": 3,
        }
        model.delete_adapter("other")
        model.set_adapter("default")
        assert torch.equal(logits(model), first)
        assert list(model.base_model.mosa_forwards) == ["default"]

    @pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
    def test_merged_and_converted(self, build: Any) -> None:
        model = train(mosa(build(), split="both", target_modules="all-linear"))
        expected = logits(model)
        converted, _ = convert_to_lora(copy.deepcopy(model), rank=8)
        assert converted.peft_type == "LORA"
        assert torch.allclose(logits(model.merge_and_unload()), expected, atol=1e-5)

    def test_a_copy_trains_apart_and_alike(self) -> None:
        model = train(mosa())
        twin = copy.deepcopy(model)
        before = logits(model)
        after = logits(train(twin))
        assert torch.equal(logits(model), before)
        assert torch.equal(logits(train(model)), after)

    def test_float32_over_a_bfloat16_base(self) -> None:
        model = mosa(tiny_llama(dtype=torch.bfloat16), split="both")
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        assert logits(train(model)).dtype == torch.bfloat16


def test_as_many_numbers_train_as_in_lora() -> None:
    for split in ("up", "down", "both"):
        method = finetune.method("mosa", r=4, n_experts=7, split=split, target_modules=["q_proj"])
        method.attach(tiny_llama(layers=3))
        assert method.summary().trained == 3 * 4 * (32 + 32)


def test_a_users_own_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    data = [{"input_ids": row, "labels": row} for row in token_batch(24, 10)]

    def run(folder: str, *, steps: int, resume: bool = False) -> dict[str, Tensor]:
        model = mosa(split="both")
        arguments = TrainingArguments(
            str(tmp_path / folder),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            activation_checkpointing=True,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data)  # type: ignore[arg-type]
        trainer.train(resume_from_checkpoint=resume)
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    whole = run("whole", steps=4)
    run("cut", steps=2)
    resumed = run("cut", steps=4, resume=True)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"target_modules": ["nothing"]}, "no module matches 'nothing'"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens is a Embedding"),
        ({"split": "left"}, "split"),
        ({"n_experts": 0}, "n_experts"),
    ],
)
def test_settings_that_do_not_fit(config: dict[str, Any], part: str) -> None:
    with pytest.raises(FinetuneError) as caught:
        finetune.method("mosa", **config).attach(tiny_llama())
    assert part in str(caught.value)


def test_what_would_draw_nothing_is_refused() -> None:
    model = mosa().train()
    with pytest.raises(TrainingError, match="nobody has drawn"):
        model.get_base_model()(input_ids=ROWS, labels=ROWS)
    with pytest.raises(ValueError, match="no name for an adapter"):
        get_peft_model(tiny_llama(), MosaConfig(**SMALL), adapter_name="mos")  # type: ignore[arg-type]
