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
import sys
import torch
from support.conformance_cases import make
from support.distributed import save_results
from support.engine_steps import EngineSteps
from finetune.config.schema import EngineSection
from finetune.engines.capabilities import unsupported

results = {}
for name in sys.argv[2].split(","):
    for stage in map(int, sys.argv[3]):
        if unsupported(make(name), f"zero-{stage}"):
            continue
        offload = {"optimizer": "cpu", **({"weights": "cpu"} if stage == 3 else {})} if sys.argv[4] == "cpu" else {}
        section = EngineSection.model_validate({"deepspeed": {"stage": stage}, "offload": offload})
        try:
            run = EngineSteps(name, "deepspeed", section, max_norm=0.5)
            state = run.train(range(2), seed=5)
            held = {f"{n}.{key}": value for n, own in run.optimizer_state().items() for key, value in own.items()}
            after = run.train(range(2, 4), seed=6)
            norms = {"all": torch.tensor(run.norms)}
            results[name, stage] = {"norms": norms, "state": state, "after": after, "optimizer": held}
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
