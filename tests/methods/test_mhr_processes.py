"""MHR on two processes, each with rows of other tasks: as on one, under DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.processes import one_and_two_processes

SCRIPT = """
import torch
from torch.nn.parallel import DistributedDataParallel
import finetune
from support.distributed import distributed, own_rows, rank, save_results, shard, whole_parameters
from support.tiny import tiny_llama

TASKS = ["a", "b", "c", "a"]
results = {}
for wrapper in ("ddp", "fsdp2"):
    for recompute in (False, True):
        method = finetune.method("mhr", tasks=["a", "b", "c"], r=2, n_skills=3, n_splits=2)
        model = method.attach(tiny_llama(layers=2))
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        network = model.train()
        if distributed and wrapper == "ddp":
            network = DistributedDataParallel(model)
        elif wrapper == "fsdp2":
            shard(model, model.base_model.model.model.layers)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        for step in range(4):
            mine = own_rows(step)
            tasks = TASKS[2 * rank : 2 * rank + 2] if distributed else TASKS
            network(input_ids=mine, labels=mine, tasks=tasks).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results[f"{wrapper} {recompute}"] = whole_parameters(model)
save_results(results)
"""


@pytest.mark.multi_process
@pytest.mark.integration
def test_two_processes_equal_one(tmp_path: Path) -> None:
    one, two = one_and_two_processes(tmp_path, SCRIPT)
    for case, parameters in one.items():
        assert parameters["base_model.mhr_router.default"].abs().max() > 1e-3
        for name, tensor in parameters.items():
            assert torch.allclose(two[case][name], tensor, atol=2e-6, rtol=1e-5), (case, name)
