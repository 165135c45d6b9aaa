"""Entries of weights that FSDP2 has taken apart: the same choice and the same weights as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.processes import one_and_two_processes

SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor
import finetune
from support.distributed import distributed, own_rows, save_results, shard, whole_parameters
from support.tiny import tiny_gpt2, tiny_llama

CASES = {
    "id3": ("id3", {"budget": 80, "select_every": 2}, tiny_llama),
    "id3 exact": ("id3", {"budget": 80, "accumulation": "exact"}, tiny_llama),
    "random": ("random", {"budget": 0.05, "weight_decay_target": "base"}, tiny_llama),
    # Not the biases: that of a key has no gradient but rounding, which Adam blows up.
    "random, all weights": ("random", {"budget": 0.05, "scope": {"include": ["weight$"]}}, tiny_gpt2),
    "spiel": ("spiel", {"budget": 0.05, "every": 3, "gradient_steps": 2}, tiny_llama),
}
results = {}
for case, (name, settings, build) in CASES.items():
    torch.manual_seed(0)
    method = finetune.method(name, **settings)
    model = method.attach(build())
    method.bind(total_steps=8)
    ignored = set(method.trained_parameters().values())
    shard(model, model.model.layers if build is tiny_llama else model.transformer.h, ignored_params=ignored)
    if distributed:
        assert all(isinstance(p, DTensor) for n, p in model.named_parameters() if n != "selected_entries")
    optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2, weight_decay=0.1)
    for step in range(8):
        mine = own_rows(step)
        model(input_ids=mine, labels=mine).loss.backward()
        torch.nn.utils.clip_grad_norm_(method.trained_parameters().values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 4:  # a state goes back to where it came from, and training goes on from it
            state = {key: tensor.clone() for key, tensor in method.state_dict().items()}
            method.load_state_dict(state)
            assert all(torch.equal(tensor, state[key]) for key, tensor in method.state_dict().items())
    state = method.state_dict()
    for key, tensor in (state.items() if distributed else ()):
        other = tensor.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, tensor), (case, key)
    results[case] = (state, whole_parameters(model, without="selected_entries"))
save_results(results)
"""


@pytest.mark.multi_process
@pytest.mark.integration
def test_two_sharded_processes_equal_one(tmp_path: Path) -> None:
    one, two = one_and_two_processes(tmp_path, SCRIPT)
    for case, (state, weights) in one.items():
        found, found_weights = two[case]
        assert state.keys() == found.keys(), case
        for key, tensor in state.items():
            if key.endswith(".index"):
                assert torch.equal(found[key], tensor), (case, key)
        for key, tensor in weights.items():
            assert torch.allclose(found_weights[key], tensor, atol=1e-6, rtol=1e-5), (case, key)
