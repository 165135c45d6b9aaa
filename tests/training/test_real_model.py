"""The bundled 135M model from recipe to stock PEFT: trained, saved small, exported, and the same everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.integration]

STOCK = """
import json, sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
if adapter != "none":
    model = PeftModel.from_pretrained(model, adapter)
model.eval()
prompts = json.load(open(out + ".prompts"))
with torch.no_grad():
    logits = [model(torch.tensor([ids])).logits[0] for ids in prompts]
    texts = [model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False).tolist() for ids in prompts]
torch.save({"logits": logits, "texts": texts}, out)
assert not any(name.split(".")[0] == "finetune" for name in sys.modules)
"""


def finetune(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "finetune", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def stock(folder: Path, base: str, adapter: str, prompts: list[list[int]]) -> dict[str, list]:
    import torch

    script, out = folder / "stock.py", folder / f"{Path(adapter).name}.pt"
    script.write_text(STOCK)
    Path(f"{out}.prompts").write_text(json.dumps(prompts))
    subprocess.run(
        [sys.executable, str(script), base, adapter, str(out)], check=True, timeout=280, env=dict(os.environ)
    )
    loaded: dict[str, list] = torch.load(out)
    return loaded


def test_s2ft_on_the_bundled_model_is_the_same_in_stock_peft(tmp_path: Path) -> None:
    import torch

    from finetune.data.records import Message
    from finetune.data.render import render_prompt
    from finetune.models import load_tokenizer, resolve_source

    said = finetune(
        "train",
        "quickstart",
        "output_dir=run",
        "eval.tasks=[]",
        "train.max_steps=6",
        "train.per_device_train_batch_size=4",
        "train.logging_steps=2",
        cwd=tmp_path,
    )
    assert "trains 1,047,168 of 134,515,008 parameters" in said
    run = tmp_path / "run"
    events = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert events[-1]["loss"] < events[0]["loss"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["saved_bytes"] <= 0.04 * summary["base_bytes"]
    finetune("export", "run", "lora", "--to", "peft", cwd=tmp_path)
    finetune("merge", "run", "merged", cwd=tmp_path)

    tokenizer = load_tokenizer(str(run / "final"))
    prompts = [
        render_prompt([Message("user", text)], tokenizer) for text in ("every day at 7:05", "at noon on Mondays")
    ]
    base = resolve_source("bundled:smollm2-135m-instruct")
    adapted = stock(tmp_path, base, str(tmp_path / "lora"), prompts)
    merged = stock(tmp_path, str(tmp_path / "merged"), "none", prompts)
    for ours, theirs in zip(merged["logits"], adapted["logits"], strict=True):
        # float32 sums in another order, on logits of up to 30
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-5)
    assert merged["texts"] == adapted["texts"]
