"""Our tuners in a script that somebody already has: ``get_peft_model``, stock ``transformers.Trainer``, its resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from finetune.peft import ShardsConfig, SkillsConfig
from support.tiny import tiny_llama, token_batch

ROWS = token_batch(8, 12)
SHARDS = {"r": 4, "equiv_rank": 2, "private_rank": 1, "num_shards": 2}
SKILLS = {"tasks": ["a", "b"], "r": 2, "n_skills": 3, "n_splits": 2}
CASES = {"mos": (ShardsConfig, SHARDS), "mhr": (SkillsConfig, SKILLS)}


def trainer_of(name: str, folder: Path, **options: Any) -> Trainer:
    kind, settings = CASES[name]
    config = kind(task_type="CAUSAL_LM", target_modules="all-linear", **settings)  # type: ignore[operator]
    rows = [{"input_ids": row, "labels": row, "task": "ab"[number % 2]} for number, row in enumerate(ROWS)]

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels")}
        return {**batch, "tasks": [row["task"] for row in rows]} if name == "mhr" else batch

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        gradient_checkpointing=True,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    model = get_peft_model(tiny_llama(layers=4), config)
    return Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)


@pytest.mark.parametrize("name", list(CASES))
def test_trains_saves_and_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    trainer = trainer_of(name, tmp_path)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    files = {path.name for path in (tmp_path / "checkpoint-6").glob("*.safetensors")}
    assert files == {"adapter_model.safetensors"}
    expected = {key: p.detach().clone() for key, p in trainer.model.named_parameters() if p.requires_grad}
    loaded = PeftModel.from_pretrained(tiny_llama(layers=4), tmp_path / "checkpoint-6")
    shutil.rmtree(tmp_path / "checkpoint-6")
    again = trainer_of(name, tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert expected
    for key, tensor in expected.items():
        assert torch.equal(again.model.get_parameter(key), tensor), key
        assert torch.equal(loaded.get_parameter(key), tensor), key
