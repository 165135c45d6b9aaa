"""The verbs of ``finetune adapter``, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import finetune
from finetune.models import load_model
from support.tiny import save_tiny_model, token_batch

pytestmark = pytest.mark.integration


def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "finetune", "adapter", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with ``base`` and the learned states ``a`` and ``b``."""
    root = tmp_path_factory.mktemp("adapters")
    base = save_tiny_model(root / "base", dtype=torch.bfloat16)
    for folder, name, settings in (("a", "s2ft", {"ratio": 0.2}), ("b", "random", {"budget": 0.02})):
        method = finetune.method(name, **settings)
        model = method.attach(load_model(str(base), dtype="float32"))
        optimizer = torch.optim.AdamW(method.trained_parameters().values(), lr=1e-2)
        ids = token_batch()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        method.save(root / folder)
    return root


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    first, second = tensors(a), tensors(b)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_models_with_without_and_with_another_adapter(folders: Path, tmp_path: Path) -> None:
    run("apply", folders / "base", folders / "a", tmp_path / "with-a")
    assert not same(tmp_path / "with-a", folders / "base")
    assert {tensor.dtype for tensor in tensors(tmp_path / "with-a").values()} == {torch.bfloat16}
    assert (tmp_path / "with-a" / "tokenizer.json").is_file()
    run("switch", tmp_path / "with-a", folders / "a", folders / "b", tmp_path / "with-b")
    run("apply", folders / "base", folders / "b", tmp_path / "straight-b")
    assert same(tmp_path / "with-b", tmp_path / "straight-b")
    run("unapply", tmp_path / "with-b", folders / "b", tmp_path / "plain")
    assert same(tmp_path / "plain", folders / "base")


def test_what_was_learned_of_an_untied_embedding_stays_out_of_the_head(folders: Path, tmp_path: Path) -> None:
    method = finetune.method("random", budget=40, scope={"include": ["embed_tokens"]})
    model = method.attach(load_model(str(folders / "base"), dtype="float32", tied="untie"))
    ids = token_batch()
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(method.trained_parameters().values(), lr=10.0).step()
    method.save(tmp_path / "learned")
    run("apply", folders / "base", tmp_path / "learned", tmp_path / "tuned")
    tuned, base = (
        load_model(str(tmp_path / "tuned"), dtype="float32"),
        load_model(str(folders / "base"), dtype="float32"),
    )
    assert torch.equal(tuned.lm_head.weight, base.lm_head.weight)
    assert not torch.equal(tuned.model.embed_tokens.weight, base.model.embed_tokens.weight)


def test_show_fuse_and_diff(folders: Path, tmp_path: Path) -> None:
    shown = json.loads(run("show", folders / "a", "--json").stdout)
    assert shown["method"] == "s2ft"
    assert {row["form"] for row in shown["tensors"]} == {"slices along axis 1"}
    assert "s2ft on" in run("show", folders / "a").stdout
    run("fuse", tmp_path / "both", folders / "a", folders / "b", "--weights", "0.5,0.5")
    run("apply", folders / "base", tmp_path / "both", tmp_path / "with-both")
    compared = json.loads(run("diff", folders / "a", folders / "b", "--json").stdout)["total"]
    assert compared["only_first"] > 0
    assert compared["only_second"] > 0
    assert run("diff", folders / "a", folders / "b").stdout.splitlines()[-1].startswith("total")


def test_mistakes_get_one_clear_message(folders: Path, tmp_path: Path) -> None:
    assert "is there already" in run("apply", folders / "base", folders / "a", folders / "b", code=3).stderr
    assert "tuned values" in run("unapply", folders / "base", folders / "a", tmp_path / "out", code=2).stderr
    wrong = run("fuse", tmp_path / "out", folders / "a", folders / "b", "--weights", "0.5", code=2).stderr
    assert "2 numbers with commas" in wrong
    assert "missing" in run("show", tmp_path, code=2).stderr
    assert "finetune adapter apply --help" in run("apply", folders / "base", code=2).stderr
    assert not (tmp_path / "out").exists()
