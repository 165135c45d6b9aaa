"""The checks during training, each made to fail by the fault that it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import finetune
from finetune.core.errors import TrainingError
from finetune.training.inflight import InFlightChecks
from support.tiny import tiny_llama, token_batch

ROWS = [{"input_ids": row, "labels": row} for row in token_batch(8, 8)]


def run(
    folder: Path, *, break_it: Any = None, learning_rate: float = 1e-2, steps: int = 5, optimizer: Any = None
) -> int:
    method = finetune.method("s2ft", ratio=0.2)
    model = method.attach(tiny_llama())
    arguments = TrainingArguments(
        str(folder), max_steps=steps, learning_rate=learning_rate, report_to="none", use_cpu=True, disable_tqdm=True
    )
    callbacks: list[TrainerCallback] = [InFlightChecks(method)]
    if break_it is not None:
        callbacks.append(break_it(model))
    optimizers = (None, None) if optimizer is None else (optimizer(model, method), None)
    trainer = Trainer(model=model, args=arguments, train_dataset=ROWS, callbacks=callbacks, optimizers=optimizers)
    return trainer.train().global_step


def test_a_sound_run_goes_through(tmp_path: Path) -> None:
    assert run(tmp_path) == 5


@pytest.mark.parametrize("steps", [2, 5])
def test_a_run_that_changes_nothing_is_stopped_however_short(tmp_path: Path, steps: int) -> None:
    with pytest.raises(TrainingError, match="does not change the model"):
        run(tmp_path, learning_rate=0.0, steps=steps)


def test_frozen_weights_that_move_are_named(tmp_path: Path) -> None:
    class Move(TrainerCallback):
        def __init__(self, model: Any) -> None:
            self.norm = model.model.norm.weight

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                self.norm.add_(1e-3)

    with pytest.raises(TrainingError, match="frozen weights changed") as caught:
        run(tmp_path, break_it=Move)
    assert "model.norm.weight" in caught.value.where


def test_a_trained_parameter_without_gradient_is_named(tmp_path: Path) -> None:
    class Lose(TrainerCallback):
        def __init__(self, model: Any) -> None:
            self.columns = model.model.layers[0].mlp.down_proj.columns
            self.columns.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))

    with pytest.raises(TrainingError, match="1 of 4 trained parameters got no gradient") as caught:
        run(tmp_path, break_it=Lose)
    assert caught.value.where == "model.layers.0.mlp.down_proj.columns"


@pytest.mark.parametrize("chosen", [slice(1, None), slice(0, 0)])
def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path, chosen: slice) -> None:
    def optimizer(model: Any, method: Any) -> torch.optim.Optimizer:
        trained = list(method.trained_parameters().values())[chosen]
        return torch.optim.AdamW([*trained, model.model.norm.weight], lr=1e-2)

    with pytest.raises(TrainingError, match="the optimizer does not hold"):
        run(tmp_path, optimizer=optimizer)
