"""Whole runs on a tiny model: every method with the same recipe, what a run leaves, what it refuses."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import finetune
from finetune.core.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    DataError,
    FinetuneError,
    RefusedError,
    TargetError,
    TrainingError,
)
from finetune.models import load_tuned
from finetune.training.run import RunResult
from support.tiny import save_tiny_model

PROMPTS = [f"say {i}" for i in range(24)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model, rows, a task and a recipe for S2FT."""
    folder = tmp_path_factory.mktemp("workshop")
    save_tiny_model(folder / "model")
    rows = [{"prompt": prompt, "completion": "yes" if i % 2 else "no"} for i, prompt in enumerate(PROMPTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text("kind: exact_match\ndata: rows.jsonl\nmax_new_tokens: 3\n")
    (folder / "recipe.yaml").write_text(
        f"model: {{name_or_path: {folder / 'model'}, dtype: float32, device: cpu}}\n"
        "method: {name: s2ft, ratio: 0.1}\n"
        f"data: {{train: {folder / 'rows.jsonl'}, eval: 4}}\n"
        "train: {per_device_train_batch_size: 4, learning_rate: 1e-2, max_steps: 6, save_steps: 3, logging_steps: 2}\n"
        f"eval: {{tasks: [{folder / 'task.yaml'}], limit: 6}}\n"
        f"output_dir: {folder / 'run'}\n"
    )
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def train(workshop: Path, output: Path, *overrides: str) -> RunResult:
    return finetune.train(workshop / "recipe.yaml", f"output_dir={output}", *overrides)


@pytest.fixture(scope="module")
def s2ft_run(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "s2ft"
    assert train(workshop, output).status == "completed"
    return output


def test_a_run_leaves_what_it_promises(s2ft_run: Path) -> None:
    expected = {
        "config.yaml",
        "config.resolved.yaml",
        "run.json",
        "metrics.jsonl",
        "samples.txt",
        "summary.json",
        "report.html",
        "plots",
        "final",
        "checkpoint-3",
        "checkpoint-6",
    }
    assert {path.name for path in s2ft_run.iterdir()} == expected
    record = json.loads((s2ft_run / "run.json").read_text())
    assert (record["status"], record["method"]["name"], record["data"]["examples"]) == ("completed", "s2ft", 20)
    assert record["final"]["eval_loss"] > 0
    assert [result["metric"] for result in record["evaluation"]["after"]] == ["exact_match"]
    summary = json.loads((s2ft_run / "summary.json").read_text())
    keys = [
        "exact_match_before",
        "exact_match_after",
        "train_seconds",
        "peak_memory_bytes",
        "saved_bytes",
        "base_bytes",
    ]
    assert list(summary) == keys
    events = [json.loads(line) for line in (s2ft_run / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if "loss" in event]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert {path.name for path in (s2ft_run / "final").iterdir()} >= {
        "README.md",
        "delta.safetensors",
        "tokenizer.json",
    }
    assert "[yes<|im_end|>]" in (s2ft_run / "samples.txt").read_text()


def test_checkpoints_hold_what_trains_and_no_base(s2ft_run: Path) -> None:
    record = json.loads((s2ft_run / "run.json").read_text())
    trained = record["method"]["trained"]
    tensors = sum(file.stat().st_size for file in (s2ft_run / "checkpoint-6").glob("*.safetensors"))
    assert tensors < 3 * 4 * trained + 8192  # values, base values, indices, headers
    assert not list((s2ft_run / "checkpoint-6").glob("model*"))
    assert not list((s2ft_run / "checkpoint-6").glob("tokenizer*"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in ("lora", "full", "dora", "vera", "top_layers", "id3", "fish", "spiel")),
        *((name, dtype) for name in ("lisa", "badam", "gradual", "cofitune") for dtype in ("float32", "bfloat16")),
        ("spectrum", "float32"),
        ("pure_sharing", "float32"),
        ("shira", "float32"),
    ],
)
def test_the_same_recipe_trains_with_every_method(workshop: Path, tmp_path: Path, name: str, dtype: str) -> None:
    own = {"lisa": ["method.layers=1", "method.interval=2"], "badam": ["method.interval=2"]}
    own |= {"shira": ["method.target_modules=[q_proj]", "method.r=4"], "gradual": ["method.every=2"]}
    own |= {"cofitune": ["method.layers=0-1"], "spectrum": ["method.top_percent=50"]}
    with pytest.warns(UserWarning, match="ratio"):
        result = train(
            workshop,
            tmp_path / "run",
            f"method.name={name}",
            f"model.dtype={dtype}",
            "eval.tasks=[]",
            *own.get(name, []),
        )
    assert result.record["method"]["name"] == name
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert ("PeftModel.from_pretrained" in card) is (name in {"lora", "dora", "vera", "shira"})
    model, _ = load_tuned(tmp_path / "run", dtype="float32", device="cpu")
    assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_methods_choose_by_the_calibration_rows(workshop: Path, tmp_path: Path) -> None:
    from finetune.config.load import load_recipe
    from finetune.training.plan import make_plan

    rows = [{"prompt": f"generally {i}", "completion": "fine"} for i in range(6)]
    (tmp_path / "general.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = ["method={name: cofitune, layers: '0', calibration: 5}", f"data.calibration={tmp_path}/general.jsonl"]
    for given, word, count in ((overrides, "generally", 5), (overrides[:1], "say", 5)):
        plan = make_plan(load_recipe([str(workshop / "recipe.yaml")], given).recipe)
        texts = [plan.tokenizer.decode(row) for batch in plan._calibration() for row in batch["input_ids"]]
        assert len(texts) == count
        assert all(word in text for text in texts)


def two_processes(workshop: Path, output: Path, *overrides: str) -> str:
    recipe = [str(workshop / "recipe.yaml"), f"output_dir={output}", "eval.tasks=[]", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "finetune", "train", *recipe, "--nproc", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((output / "run.json").read_text())["status"] == "completed"
    load_tuned(output, dtype="float32", device="cpu")
    return done.stderr


@pytest.mark.integration
@pytest.mark.multi_process
@pytest.mark.parametrize("method", ["{name: lisa, layers: 1, interval: 2}", "top_layers"])
def test_a_recipe_trains_in_two_processes(workshop: Path, tmp_path: Path, method: str) -> None:
    said = two_processes(workshop, tmp_path / "run", f"method={method}")
    assert "find_unused_parameters" not in said  # torch warns of what is not needed


@pytest.mark.integration
@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("full", "strategy: fsdp"),
        ("{name: lora, r: 2}", "strategy: fsdp"),
        ("full", "strategy: deepspeed, deepspeed: {stage: 3}"),
        pytest.param("{name: lora, r: 2}", "strategy: deepspeed, deepspeed: {stage: 3}", marks=pytest.mark.slow),
        pytest.param("s2ft", "strategy: deepspeed, deepspeed: {stage: 2}", marks=pytest.mark.slow),
        pytest.param("magnitude", "strategy: deepspeed, deepspeed: {stage: 1}", marks=pytest.mark.slow),
    ],
)
def test_a_sharded_run_is_that_of_one_process_and_goes_on_from_its_checkpoint(
    workshop: Path, tmp_path: Path, method: str, engine: str
) -> None:
    run, once = tmp_path / "run", tmp_path / "once"
    # Adam's first step of a gradient near zero is a matter of rounding, unless eps is above it.
    same = [f"method={method}", "train.adam_epsilon=1e-3", "train.activation_checkpointing=true"]
    sharded = [*same, "train.per_device_train_batch_size=2", f"engine={{{engine}}}"]
    train(workshop, once, *same, "train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=2")
    two_processes(workshop, run, *sharded)
    for expected, found in zip(steps(once), steps(run), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    expected, found = learned(once / "final"), learned(run / "final")
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, atol=2e-6, rtol=1e-5)
    shutil.rmtree(run / "checkpoint-6")
    shutil.rmtree(run / "final")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "interrupted"}))
    two_processes(workshop, run, *sharded, "--resume")
    for key, tensor in learned(run / "final").items():
        assert torch.equal(tensor, found[key]), key


def steps(run: Path) -> list[dict[str, float]]:
    """Returns loss and gradient norm of each step that was logged."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in ("loss", "grad_norm")} for row in rows if "loss" in row]


def learned(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def test_a_tuned_model_is_merged_exported_and_asked(s2ft_run: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from finetune.evaluation.chat import ChatSession
    from finetune.evaluation.run import evaluate_run
    from finetune.export.merge import merge_run
    from finetune.export.run import export_run

    ids = torch.tensor([[9, 20, 31, 42]])
    tuned, _ = load_tuned(s2ft_run, dtype="float32", device="cpu")
    expected = tuned(ids).logits
    merge_run(s2ft_run, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(merged(ids).logits, expected)
    export_run(s2ft_run, tmp_path / "lora", "peft")
    record = json.loads((s2ft_run / "run.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(record["model"]["name_or_path"])
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "lora"))
    torch.testing.assert_close(adapted(ids).logits, expected, atol=1e-5, rtol=1e-5)
    (result,) = evaluate_run(str(s2ft_run), limit=6)
    assert result.value == record["evaluation"]["after"][0]["value"]
    assert isinstance("".join(ChatSession(str(s2ft_run), max_new_tokens=3).reply("say 1")), str)


def test_a_dry_run_checks_everything_and_writes_nothing(workshop: Path, tmp_path: Path) -> None:
    from finetune.config.load import load_recipe
    from finetune.training.run import train as run

    loaded = load_recipe([str(workshop / "recipe.yaml")], [f"output_dir={tmp_path / 'dry'}"])
    assert run(loaded, dry_run=True).status == "planned"
    assert not (tmp_path / "dry").exists()


@pytest.mark.parametrize(
    ("overrides", "error", "part"),
    [
        (["method.name=lora", "method.target_modules=[q_porj]"], TargetError, "q_porj"),
        (["method.name=bitfit"], TargetError, "no biases"),
        (["method.name=id3", "method.budget=100000000"], TargetError, "larger than the scope"),
        (["method.name=fish", "method.scope.include=[dwn_proj]"], TargetError, "down_proj"),
        (["method.name=random", "method.budget=0"], ConfigError, "more than 0 or at least 1"),
        (["data.max_length=4"], DataError, "no row is left"),
        (["data.chat_template=nothing"], FinetuneError, "nothing"),
        (["model.name_or_path=./missing"], ConfigError, "there is no file"),
        (["train.learning_rate=0"], TrainingError, "does not change the model"),
        (["train.learning_rate=3e38", "train.max_grad_norm=0"], TrainingError, "not finite"),
    ],
)
def test_what_cannot_train_ends_with_one_clear_error(
    workshop: Path, tmp_path: Path, overrides: list[str], error: type[FinetuneError], part: str
) -> None:
    with pytest.raises(error) as caught:
        train(workshop, tmp_path / "run", "eval.tasks=[]", *overrides)
    assert part in str(caught.value)
    if (tmp_path / "run" / "run.json").exists():
        assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
        assert not (tmp_path / "run" / "final").exists()


def without_weights(model: Path, folder: Path) -> Path:
    """Returns a copy of a model's folder that has no weights to read."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("{name: id3, budget: 100000000}", "larger than the scope"),
        ("{name: snip, scope: {include: [dwn_proj]}}", "down_proj"),
        ("{name: lora, target_modules: [q_porj]}", "q_porj"),
        ("bitfit", "no biases"),
    ],
)
def test_what_the_model_lacks_is_said_before_weights_are_read(
    workshop: Path, tmp_path: Path, method: str, part: str
) -> None:
    blank = without_weights(workshop / "model", tmp_path / "model")
    with pytest.raises(FinetuneError) as caught:
        train(workshop, tmp_path / "run", f"model.name_or_path={blank}", f"method={method}", "eval.tasks=[]")
    assert part in str(caught.value)


@pytest.mark.parametrize("method", ["s2ft", "random", "full", "top_layers"])
def test_quantised_weights_are_refused_before_they_are_read(workshop: Path, tmp_path: Path, method: str) -> None:
    quantised = without_weights(workshop / "model", tmp_path / "model")
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(CapabilityError, match="these are quantised") as caught:
        train(workshop, tmp_path / "run", f"model.name_or_path={quantised}", f"method.name={method}", "eval.tasks=[]")
    assert "method.form: delta" in caught.value.fix


def test_an_earlier_run_is_neither_overwritten_nor_mixed_up(workshop: Path, s2ft_run: Path) -> None:
    from finetune.config.load import load_recipe
    from finetune.training.run import train as run

    def again(*overrides: str, **flags: Any) -> RunResult:
        return run(load_recipe([str(workshop / "recipe.yaml")], [f"output_dir={s2ft_run}", *overrides]), **flags)

    before = {path: path.stat().st_mtime_ns for path in s2ft_run.rglob("*") if path.is_file()}
    with pytest.raises(RefusedError, match="an earlier run"):
        again()
    with pytest.raises(CheckpointError, match="another method"):
        again("method.name=lora", "eval.tasks=[]", resume="last")
    with pytest.raises(DataError):
        again("data.max_length=4", overwrite=True)
    # A run that has ended is not run again.
    assert again(resume="last").status == "completed"
    assert {path: path.stat().st_mtime_ns for path in s2ft_run.rglob("*") if path.is_file()} == before


def test_packing_and_activation_checkpointing_train(workshop: Path, tmp_path: Path) -> None:
    result = train(
        workshop,
        tmp_path / "run",
        "data.packing=true",
        "data.max_length=128",
        "data.eval=null",
        "train.activation_checkpointing=true",
        "train.per_device_train_batch_size=2",
        "eval.tasks=[]",
    )
    assert result.status == "completed"


def test_the_page_of_a_spectrum_run_shows_the_ranking(workshop: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="ratio"):
        train(workshop, tmp_path / "run", "method.name=spectrum", "method.top_percent=50", "eval.tasks=[]")
    picture = tmp_path / "run" / "plots" / "signal_to_noise_ratios.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}" in page


def test_a_checkpoint_that_lacks_a_part_of_what_was_trained_stops_the_run(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.core.learned_state import write_learned_state
    from finetune.methods.selective.s2ft import S2FT

    def incomplete(self: Any, folder: Path) -> None:
        state = self.state_dict()
        write_learned_state(folder, dict(list(state.items())[:3]), self.metadata())

    monkeypatch.setattr(S2FT, "save", incomplete)
    with pytest.raises(CheckpointError, match="less than what was trained"):
        train(workshop, tmp_path / "run", "eval.tasks=[]")
    assert not list((tmp_path / "run").glob("checkpoint-*"))
