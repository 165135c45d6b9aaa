"""Methods in stock ``transformers.Trainer``: exact resume by one callback, the same result on two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import finetune
from finetune.core.errors import CheckpointError
from finetune.methods import build_method
from support.processes import one_and_two_processes
from support.tiny import tiny_llama, token_batch

NAMES = {
    "s2ft": {"ratio": 0.2},
    "id3": {"budget": 60},
    "random": {"weight_decay_target": "base"},
    "top_layers": {},
    "lora": {"r": 2, "target_modules": "all-linear"},
}
ROWS = [{"input_ids": row, "labels": row} for row in token_batch(16, 10)]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        max_steps=6,
        save_steps=3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
        **options,
    )


def trained(folder: Path, name: str, *, seed: int, resume: str | None = None, callbacks: bool = True) -> Any:
    torch.manual_seed(seed)
    method = finetune.method(name, **NAMES[name])
    model = method.attach(tiny_llama())
    trainer = Trainer(
        model=model,
        args=arguments(folder),
        train_dataset=ROWS,
        callbacks=method.callbacks() if callbacks else [],
    )
    trainer.train(resume_from_checkpoint=resume)
    return {key: tensor.clone() for key, tensor in method.state_dict().items()}


@pytest.mark.parametrize("name", list(NAMES))
def test_stock_trainer_resumes_exactly_with_the_callback(tmp_path: Path, name: str) -> None:
    expected = trained(tmp_path, name, seed=1)
    found = trained(tmp_path, name, seed=2, resume=str(tmp_path / "checkpoint-3"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_a_checkpoint_without_the_methods_state_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, "s2ft", seed=1, callbacks=False)
    with pytest.raises(CheckpointError, match="no state of 's2ft'"):
        trained(tmp_path, "s2ft", seed=2, resume=str(tmp_path / "checkpoint-3"))


# Of entries the reentrant kind is refused: tests/methods/test_id3.py.
@pytest.mark.parametrize(
    ("own", "reentrant"), [("s2ft", False), ("random", False), ("lora", False), ("s2ft", True), ("lora", True)]
)
def test_the_backward_pass_ends_at_the_lowest_trained_block_also_when_activations_are_recomputed(
    tmp_path: Path, own: str, reentrant: bool
) -> None:
    method = build_method([{"name": "top_layers", "count": 1}, {"name": own, **NAMES[own]}])
    model = method.attach(tiny_llama(layers=4))
    flowed: set[int] = set()
    blocks = model.get_base_model().model.layers if own == "lora" else model.model.layers
    for number, block in enumerate(blocks):
        block.post_attention_layernorm.register_full_backward_hook(lambda module, grads, outs, n=number: flowed.add(n))
    options = arguments(
        tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    trainer = Trainer(model=model, args=options, train_dataset=ROWS, callbacks=method.callbacks())
    trainer.train()
    # Reentrant recomputation loses the gradient of a block whose input needs none.
    assert flowed == ({0, 1, 2, 3} if reentrant else {3})


TWO_PROCESSES = """
import json, sys
import torch, torch.distributed
from torch.nn.parallel import DistributedDataParallel
import finetune
from support.distributed import distributed, own_rows, save_results
from support.tiny import tiny_llama, tiny_qwen

results = {}
for name, settings in json.loads(sys.argv[2]).items():
    torch.manual_seed(0)
    method = finetune.method(name, **settings)
    model = method.attach(tiny_qwen() if name == "bitfit" else tiny_llama())
    method.bind(total_steps=4)
    sent = []
    wrapped = model
    if distributed:
        wrapped = DistributedDataParallel(model)
        def count(state, bucket):
            sent.append(bucket.buffer().numel())
            work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
            return work.then(lambda done: done.value()[0])
        wrapped.register_comm_hook(None, count)
    optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2)
    for step in range(4):
        mine = own_rows(step)
        wrapped(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = method.state_dict()
    if distributed:
        assert sum(sent) == 4 * method.summary().trained, (name, sum(sent))
        for tensor in state.values():
            copy = tensor.clone()
            torch.distributed.broadcast(copy, 0)
            assert torch.equal(copy, tensor), name
    results[name] = state
save_results(results)
"""


@pytest.mark.multi_process
@pytest.mark.integration
def test_two_processes_equal_one_and_exchange_only_what_trains(tmp_path: Path) -> None:
    names = {**NAMES, "bitfit": {}}
    one, two = one_and_two_processes(tmp_path, TWO_PROCESSES, json.dumps(names))
    for name in names:
        for key, tensor in one[name].items():
            # A thousandth of one of Adam's steps, which blow the rounding of a tiny gradient up.
            torch.testing.assert_close(two[name][key], tensor, atol=1e-5, rtol=1e-5)
