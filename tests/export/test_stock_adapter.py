"""Learned entries and slices as adapters that stock PEFT loads, in a process that knows nothing of this package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from finetune.core.errors import CapabilityError
from finetune.export.run import export_run
from support.steps import adamw, take_steps
from support.tiny import save_tiny_model, tiny_gpt2, token_batch

IDS = token_batch()
STOCK = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
model = PeftModel.from_pretrained(model, sys.argv[2]).eval()
assert "finetune" not in sys.modules
ids = torch.load(sys.argv[3])
with torch.no_grad():
    logits = model(ids).logits
    kind = model.active_peft_config.peft_type.value
    merged = model.merge_and_unload()(ids).logits
torch.save((logits, merged, kind), sys.argv[4])
"""


def trained(name: str, base: Path, folder: Path, **settings: Any) -> torch.Tensor:
    """Trains a little, saves what was learned, and returns the logits of the tuned model."""
    from finetune.models import load_model

    method = finetune.method(name, **settings)
    model = method.attach(load_model(str(base), dtype="float32"), calibration=[{"input_ids": IDS, "labels": IDS}])
    method.bind(total_steps=3)
    take_steps(model, adamw(method), range(3))
    method.save(folder)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(IDS).logits
    return logits


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("random", {"budget": 0.05}),
        ("id3", {"budget": 0.03}),
        ("fish", {"budget": 300}),
        ("s2ft", {"o_ratio": 0.5, "down_ratio": 0.2, "v_ratio": 0.5, "gate_ratio": 0.1}),
    ],
)
def test_stock_peft_gives_the_logits_of_the_tuned_model(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base")
    expected = trained(name, base, tmp_path / "learned", **settings)
    export_run(tmp_path / "learned", tmp_path / "adapter", "peft")
    torch.save(IDS, tmp_path / "ids")
    command = [sys.executable, "-c", STOCK, str(base), str(tmp_path / "adapter"), str(tmp_path / "ids")]
    done = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    logits, merged, kind = torch.load(tmp_path / "out")
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-5)
    assert kind == ("LORA" if name == "s2ft" else "SHIRA")


def test_a_fused_state_of_slices_and_entries_exports(tmp_path: Path) -> None:
    from peft import PeftModel

    from finetune.models import load_model

    base = save_tiny_model(tmp_path / "base")
    trained("random", base, tmp_path / "a", budget=0.02)
    trained("s2ft", base, tmp_path / "b", o_ratio=0.25, down_ratio=0.05)
    finetune.adapters.fuse([(tmp_path / "a", 0.5), (tmp_path / "b", 1.0)], tmp_path / "both")
    export_run(tmp_path / "both", tmp_path / "adapter", "peft")
    expected = finetune.load(load_model(str(base), dtype="float32"), tmp_path / "both")
    adapted = PeftModel.from_pretrained(load_model(str(base), dtype="float32"), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(IDS).logits, expected(IDS).logits, atol=1e-5, rtol=1e-5)


def test_what_stock_peft_cannot_hold_is_refused(tmp_path: Path) -> None:
    method = finetune.method("random", budget=20)
    method.attach(tiny_gpt2())
    with pytest.raises(CapabilityError, match="SHiRA cannot hold") as caught:
        method.export_adapter(tmp_path / "out")
    assert "Conv1D" in caught.value.got
    base = save_tiny_model(tmp_path / "base")
    trained("random", base, tmp_path / "learned", budget=20, scope={"include": ["embed_tokens"]})
    with pytest.raises(CapabilityError, match="Embedding"):
        export_run(tmp_path / "learned", tmp_path / "out", "peft")
    trained("random", base, tmp_path / "dense", budget=0.9)
    with pytest.raises(CapabilityError, match="SHiRA cannot hold"):
        export_run(tmp_path / "dense", tmp_path / "out", "peft")
    assert not (tmp_path / "out").exists()
