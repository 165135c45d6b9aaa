"""What sharding gives besides the same weights: bytes, groups, int8, guards that do not pass in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.processes import run_script

SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor
import finetune
from finetune.config.schema import EngineSection
from finetune.engines.choose import choose_engine
from support.distributed import rank, save_results
from support.tiny import tiny_llama, token_batch

WORLD = dist.get_world_size()
CALLS = []  # (gather or reduce, bytes that this process hands in)
KINDS = {"all_gather_single": "gather", "all_gather_into_tensor": "gather", "reduce_scatter_single": "reduce"}
for name, kind in {**KINDS, "all_reduce": "reduce"}.items():
    def counted(*args, _own=getattr(dist, name), _name=name, _kind=kind, **kwargs):
        position, word = (0, "tensor") if _name == "all_reduce" else (1, "input_tensor")
        sent = kwargs[word] if word in kwargs else args[position] if len(args) > position else kwargs["input"]
        CALLS.append((_kind, sent.numel() * sent.element_size()))
        return _own(*args, **kwargs)
    setattr(dist, name, counted)


def train(strategy, method="lora", dtype=torch.float32, **options):
    torch.manual_seed(1)
    fields = {"r": 2, "target_modules": "all-linear"} if method == "lora" else {}
    method = finetune.method(method, **fields)
    model = method.attach(tiny_llama(layers=4, tied=False, dtype=dtype)).train()
    engine = choose_engine(strategy, EngineSection(**options), WORLD, method)
    engine.prepare(model, method, torch.device("cpu"))
    engine.begin()
    optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=0.1)
    losses = []
    for step in range(4):
        CALLS.clear()
        rows = token_batch(8, 10, seed=step).chunk(WORLD)[rank]
        with engine.micro_batch(last=True):
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    mean = torch.stack(losses)
    calls = list(CALLS)
    dist.all_reduce(mean)
    state = {key: tensor.clone() for key, tensor in method.state_dict().items()}
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = base.model.layers
    sizes = {"block": sum(p.numel() * 4 for p in layers[0].parameters() if isinstance(p, DTensor)),
             "trained": sum(p.numel() for p in method.trained_parameters().values()),
             "tensors": len(method.trained_parameters()),
             "local": sum(p.to_local().numel() for p in layers[0].parameters() if isinstance(p, DTensor)) * 4}
    return {"losses": mean / WORLD, "state": state, "calls": calls, "sizes": sizes,
            "loss_dtype": str(loss.dtype), "describe": engine.describe()}


results = {"fsdp": train("fsdp"), "hsdp": train("hsdp", shard_size=2), "full": train("fsdp", "full"),
           "hsdp full": train("hsdp", "full", shard_size=2), "int8": train("fsdp", gather_dtype="int8"),
           "bfloat16": train("fsdp", "full", dtype=torch.bfloat16)}
save_results(results)
"""


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("four")
    (folder / "script.py").write_text(SCRIPT)
    run_script(folder / "script.py", folder / "out.pt", processes=4)
    found: dict[str, dict[str, object]] = torch.load(folder / "out.pt")
    return found


@pytest.mark.multi_process
@pytest.mark.integration
class TestFourProcesses:
    def test_groups_train_what_one_shard_group_does(self, four: Any) -> None:
        for one, groups in (("fsdp", "hsdp"), ("full", "hsdp full")):
            torch.testing.assert_close(four[groups]["losses"], four[one]["losses"], atol=1e-6, rtol=1e-6)
            for key, tensor in four[one]["state"].items():
                torch.testing.assert_close(four[groups]["state"][key], tensor, atol=1e-6, rtol=1e-5)
        assert "2 copies" in four["hsdp"]["describe"]
        assert four["hsdp"]["sizes"]["local"] == 2 * four["fsdp"]["sizes"]["local"]

    def test_of_an_adapter_only_its_gradients_travel(self, four: Any) -> None:
        calls, sizes = four["fsdp"]["calls"], four["fsdp"]["sizes"]
        reduced = [size for name, size in calls if name == "reduce"]
        # In float32, with a flag for each tensor that there is a gradient.
        assert sum(reduced) == 4 * (sizes["trained"] + sizes["tensors"])
        gathered = [size for name, size in calls if name == "gather"]
        # Four blocks twice; the embedding, whose backward pass needs no weight, and what follows the blocks, once.
        assert len(gathered) == 4 * 2 + 2
        assert gathered.count(sizes["local"]) >= 8

    def test_int8_takes_a_byte_per_number_and_a_scale_per_group(self, four: Any) -> None:
        exact, rounded = four["fsdp"], four["int8"]
        block = exact["sizes"]["local"]
        sent = sum(size for name, size in rounded["calls"] if name == "gather")
        others = sum(size for name, size in exact["calls"] if name == "gather") - 8 * block
        groups = -(-block // 4 // 64)  # of 64 numbers, one byte each, with a float32 scale
        assert sent - others == 8 * groups * (64 + 4)
        torch.testing.assert_close(rounded["losses"], exact["losses"], atol=2e-2, rtol=0)
        assert not torch.equal(rounded["losses"], exact["losses"])

    def test_the_loss_of_a_bfloat16_model_stays_float32(self, four: Any) -> None:
        assert four["bfloat16"]["loss_dtype"] == "torch.float32"
        assert all(tensor.dtype == torch.float32 for tensor in four["bfloat16"]["state"].values())
