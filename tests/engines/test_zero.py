"""Methods under DeepSpeed's ZeRO on two processes: the weights, norms, saved and optimizer state of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import finetune
from finetune.config.schema import EngineSection
from finetune.core.errors import CapabilityError, ConfigError
from finetune.engines.capabilities import unsupported
from finetune.engines.choose import choose_engine
from finetune.engines.zero import Zero
from finetune.engines.zero_config import read_config
from finetune.methods import METHODS, discover
from support.conformance_cases import CASES
from support.processes import one_and_two_processes

RANDOM = {"pvera": "it draws noise for every row"}
"""Methods whose gradient is not the mean over the micro-batches, and why."""
ROUNDED = {"randlora": 10.0}
"""Methods whose sums over many random factors make rounding larger, and how many times."""

SCRIPT = """
import copy, sys
import torch
from accelerate.state import GradientState
from support.distributed import distributed, rank, save_results
from support.conformance_cases import base_model, make
from support.tiny import token_batch
from finetune.engines.choose import choose_engine
from finetune.engines.capabilities import unsupported
from finetune.config.schema import EngineSection

PROCESSES = 2 if distributed else 1
ROWS, MICRO, NORM = 8, 2, 0.5  # of a global batch, of one forward pass; the norm to clip to


def steps(engine, model, method, optimizer, numbers):
    accumulation = ROWS // MICRO // PROCESSES
    norms = []
    for number in numbers:
        batch = token_batch(ROWS, 10, seed=number)
        for part in range(accumulation):
            start = MICRO * (part * PROCESSES + rank)
            rows = batch[start : start + MICRO]
            GradientState()._set_sync_gradients(part == accumulation - 1)  # as every trainer says it
            task = {"tasks": ["one"] * MICRO} if method.routes else {}
            with engine.micro_batch(last=part == accumulation - 1):
                (engine.network(model)(input_ids=rows, labels=rows, **task).loss / accumulation).backward()
        norm = engine.grad_norm()
        if norm is None:
            norm = float(torch.nn.utils.clip_grad_norm_(method.trained_parameters().values(), NORM))
        norms.append(norm)
        optimizer.step()
        optimizer.zero_grad()
    with engine.whole():
        return norms, {key: tensor.clone() for key, tensor in method.state_dict().items()}


def run(name, section):
    base = base_model(name, layers=4) if name != "bitfit" else base_model(name)
    method = make(name)
    torch.manual_seed(3)
    ids = token_batch(4, 16)
    model = method.attach(base, calibration=[{"input_ids": ids, "labels": ids}])
    method.bind(total_steps=6)
    engine = choose_engine("deepspeed" if distributed else "single", section, PROCESSES, method)
    engine.prepare(model, method, torch.device("cpu"))
    model.train()
    # Adam's first step of a gradient near zero is a matter of rounding, unless eps is above it.
    optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    optimizer = engine.take(optimizer, max_norm=NORM)
    engine.begin()
    torch.manual_seed(5)
    norms, state = steps(engine, model, method, optimizer, range(2))
    held = copy.deepcopy(engine.optimizer_state(optimizer))
    torch.manual_seed(6)
    more, after = steps(engine, model, method, optimizer, range(2, 4))
    held = {f"{number}.{key}": value for number, own in held["state"].items() for key, value in own.items()}
    return {"norms": {"all": torch.tensor(norms + more)}, "state": state, "after": after, "optimizer": held}


results = {}
for name in sys.argv[2].split(","):
    for stage in map(int, sys.argv[3]):
        if unsupported(make(name), f"zero-{stage}"):
            continue
        offload = {"optimizer": "cpu", **({"weights": "cpu"} if stage == 3 else {})} if sys.argv[4] == "cpu" else {}
        section = EngineSection.model_validate({"deepspeed": {"stage": stage}, "offload": offload})
        try:
            results[name, stage] = run(name, section)
        except Exception as error:
            raise RuntimeError(f"{name} {stage}") from error
save_results(results)
"""


def check(folder: Path, names: list[str], stages: str = "123", offload: str = "none") -> None:
    one, two = one_and_two_processes(folder, SCRIPT, ",".join(names), stages, offload)
    assert one.keys() == two.keys()
    assert {name for name, _ in one} == set(names)
    for case, expected in one.items():
        for part, held in expected.items():
            assert two[case][part].keys() == held.keys(), (case, part)
            for key, tensor in held.items():
                require_close(two[case][part][key], tensor, (*case, part, key))


def require_close(found: torch.Tensor, expected: torch.Tensor, what: tuple[object, ...]) -> None:
    assert found.shape == expected.shape, what
    times = ROUNDED.get(str(what[0]), 1.0)
    torch.testing.assert_close(found, expected, atol=1e-6 * times, rtol=1e-5 * times, msg=lambda m: f"{what} {m}")


@pytest.mark.multi_process
@pytest.mark.integration
def test_zero_trains_and_saves_what_one_process_does(tmp_path: Path) -> None:
    check(tmp_path, ["lora", "full", "fish"])


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.integration
def test_it_does_with_weights_and_optimizer_in_the_memory_of_the_cpu(tmp_path: Path) -> None:
    check(tmp_path, ["lora", "full"], "23", "cpu")


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.integration
@pytest.mark.parametrize("part", range(6))
def test_the_other_methods_do_too(tmp_path: Path, part: int) -> None:
    names = [case.values[0] for case in CASES if not case.marks]
    names = [n for n in names if n not in RANDOM and not unsupported(METHODS.get(n), "zero-1")]
    check(tmp_path, names[part::6])


def test_what_zero_cannot_do_is_refused_with_the_nearest_that_can() -> None:
    def refused(stage: int) -> set[str]:
        return {name for name in discover() if unsupported(METHODS.get(name), f"zero-{stage}")}

    assert (
        refused(1)
        == refused(2)
        == {
            *("lisa", "badam", "gradual", "mosa"),  # parameters take turns
            *("spiel", "id3", "adalora"),  # what is chosen changes while they train
            *("mezo", "lozo", "fzoo", "sparse_mezo", "shadow"),
        }
    )
    assert {"fish", "s2ft", "magnitude", "pafi", "cofitune"} <= refused(3)
    section = EngineSection.model_validate({"strategy": "deepspeed", "deepspeed": {"stage": 3}})
    with pytest.raises(CapabilityError, match=r"engine\.deepspeed\.stage: 2"):
        choose_engine("deepspeed", section, 2, finetune.method("fish"))
    with pytest.raises(CapabilityError, match=r"engine\.strategy: ddp"):
        choose_engine("deepspeed", section, 2, finetune.method("lisa"))


def test_an_optimizer_that_looks_at_whole_tensors_is_refused() -> None:
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adafactor(layer.parameters())
    with pytest.raises(CapabilityError, match=r"train\.optim: adamw_torch"):
        Zero(2, stage=1, config={}).take(optimizer, max_norm=1.0)


def test_a_gradient_that_zero_has_taken_away_was_there() -> None:
    layer, engine = torch.nn.Linear(2, 2), Zero(2, stage=2, config={})
    engine.prepare(layer, finetune.method("lora"), torch.device("cpu"))
    layer.weight.register_post_accumulate_grad_hook(engine._reached.add)
    (layer.weight @ torch.ones(2)).sum().backward()
    layer.weight.grad = None
    assert engine.has_gradient(layer.weight)
    assert not engine.has_gradient(layer.bias)
    assert engine.describe() == "deepspeed: ZeRO-2, optimizer state and gradients over 2 processes"


def test_deepspeeds_own_configuration_says_nothing_that_the_recipe_says(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    own = {"zero_optimization": {"stage": "auto", "reduce_bucket_size": 5}, "gradient_clipping": "auto"}
    file.write_text(json.dumps({**own, "bf16": {"enabled": False}}))
    assert read_config(str(file)) == {"zero_optimization": {"reduce_bucket_size": 5}}
    assert read_config(None) == {}
    with pytest.raises(ConfigError, match=r"train\.max_grad_norm") as caught:
        read_config({"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}})
    assert "engine.deepspeed.stage: 2" in str(caught.value)
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="JSON object"):
        read_config(str(file))
