"""Two tasks that contradict each other, told apart by name through a whole run: data, training, evaluation, exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import finetune
from finetune.config.load import load_recipe
from finetune.core.errors import CapabilityError, DataError, FinetuneError
from finetune.evaluation.chat import ChatSession
from finetune.evaluation.run import evaluate_run
from finetune.export.merge import merge_run
from finetune.export.run import export_run
from finetune.models import load_tuned
from finetune.report.record import next_commands
from finetune.training import plan
from finetune.training.run import train as resume
from support.tiny import save_tiny_model

ANSWERS = {"yes": "y", "no": "no"}  # a token each
COLUMNS = "columns: {prompt: question, completion: answer}"
IDS = torch.tensor([[9, 20, 31, 42]])


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model, the same prompts with another answer for each task, and a recipe."""
    folder = tmp_path_factory.mktemp("workshop")
    save_tiny_model(folder / "model")
    for name, answer in ANSWERS.items():
        rows = [{"question": f"say {i}", "answer": answer} for i in range(12)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(
            f"kind: exact_match\ndata: {name}.jsonl\nmax_new_tokens: 1\n"
            f"{COLUMNS}\n" + ("task: always_no\n" if name == "no" else "")
        )
    (folder / "recipe.yaml").write_text(
        f"model: {{name_or_path: {folder / 'model'}, dtype: float32, device: cpu}}\n"
        "method: {name: mhr, r: 2, n_skills: 4, n_splits: 2}\n"
        "data:\n  train:\n"
        f"    - {{path: {folder / 'yes.jsonl'}, {COLUMNS}}}\n"
        f"    - {{path: {folder / 'no.jsonl'}, {COLUMNS}, task: always_no}}\n"
        "  eval: 4\n"
        "train: {per_device_train_batch_size: 8, learning_rate: 2e-2, max_steps: 120, save_steps: 60}\n"
        f"eval: {{tasks: [{folder / 'yes.yaml'}, {folder / 'no.yaml'}]}}\n"
        f"output_dir: {folder / 'run'}\n"
    )
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def run(workshop: Path) -> Path:
    assert finetune.train(workshop / "recipe.yaml").status == "completed"
    return workshop / "run"


def test_each_task_gets_its_own_answer(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    assert [result["value"] for result in record["evaluation"]["after"]] == [1, 1]
    assert record["method"]["config"]["tasks"] == ["always_no", "yes"]
    assert [result.value for result in evaluate_run(str(run), limit=4)] == [1, 1]


def test_a_task_is_merged_exported_and_asked_by_its_name(run: Path, workshop: Path, tmp_path: Path) -> None:
    for task, answer in (("yes", "y"), ("always_no", "no")):
        tuned, _ = load_tuned(run, task=task, dtype="float32")
        expected = tuned(IDS).logits
        rounding = 5e-6 * float(expected.detach().abs().max())
        merge_run(run, tmp_path / f"{task}-merged", task=task)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"{task}-merged")
        torch.testing.assert_close(merged(IDS).logits, expected, atol=rounding, rtol=1e-5)
        export_run(run, tmp_path / f"{task}-lora", "peft", task=task)
        base = AutoModelForCausalLM.from_pretrained(workshop / "model")
        stock = PeftModel.from_pretrained(base, str(tmp_path / f"{task}-lora"))
        assert stock.active_peft_config.peft_type == "LORA"
        torch.testing.assert_close(stock(IDS).logits, expected, atol=rounding, rtol=1e-5)
        assert "".join(ChatSession(str(run), max_new_tokens=1, task=task).reply("say 3")) == answer


def test_a_run_goes_on_from_its_checkpoint_exactly(
    run: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = json.loads((run / "run.json").read_text())["model"]["attn_implementation"]
    # A measurement that comes out the other way on another day.
    monkeypatch.setattr(plan, "best_attention", lambda **_: "sdpa" if recorded == "eager" else "eager")
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-120")
    shutil.rmtree(tmp_path / "run" / "final")
    record = json.loads((run / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**record, "status": "interrupted"}))
    resume(load_recipe([str(workshop / "recipe.yaml")], [f"output_dir={tmp_path / 'run'}"]), resume="last")
    again = json.loads((tmp_path / "run" / "run.json").read_text())
    assert again["model"]["attn_implementation"] == recorded
    first, second = (finetune.load(str(workshop / "model"), folder / "final") for folder in (run, tmp_path / "run"))
    for (name, one), (_, two) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("adapt", ["z", "mu", "full"])
def test_a_new_task_starts_from_the_skills_of_an_earlier_run(
    adapt: str, run: Path, workshop: Path, tmp_path: Path
) -> None:
    new = f"{{path: {workshop / 'yes.jsonl'}, columns: {{prompt: question, completion: answer}}, task: again}}"
    overrides = ["method={name: mhr}", f"method.start={run / 'final'}", f"method.adapt={adapt}", "data.eval=null"]
    result = finetune.train(
        workshop / "recipe.yaml",
        f"data.train={new}",
        f"eval.tasks=[{{name: again, kind: exact_match, data: {workshop / 'yes.jsonl'}, {COLUMNS}}}]",
        "eval.max_new_tokens=1",
        *overrides,
        "train.max_steps=30",
        f"output_dir={tmp_path / 'run'}",
    )
    assert result.record["evaluation"]["after"][0]["value"] == 1
    assert_runs_again(tmp_path / "run", tmp_path / "again")
    if adapt == "z":  # whose rows train nothing
        error = refuses(workshop, tmp_path / "no", f"data.train={new.replace('again', 'yes')}", *overrides)
        assert "the earlier run has trained this task" in str(error)


def assert_runs_again(run: Path, again: Path) -> None:
    """Checks that a run's own copy of its recipe gives the same weights."""
    assert finetune.train(run / "config.resolved.yaml", f"output_dir={again}").status == "completed"
    first, second = (load_file(folder / "final" / "adapter_model.safetensors") for folder in (run, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_copy_of_the_recipe_trains_the_same(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop)
    sources = f"[{{path: yes.jsonl, {COLUMNS}, weight: 0.5}}, {{path: no.jsonl, {COLUMNS}, task: always_no}}]"
    short = [f"data.train={sources}", "train.max_steps=2", "train.save_steps=2", "eval.tasks=[]"]
    finetune.train(workshop / "recipe.yaml", f"output_dir={tmp_path / 'run'}", *short)
    assert_runs_again(tmp_path / "run", tmp_path / "again")


def test_of_several_methods_the_report_names_each_ones_settings(workshop: Path, tmp_path: Path) -> None:
    methods = "method=[{name: mhr, r: 2, n_skills: 4, n_splits: 2}, {name: id3, budget: 200}]"
    run = tmp_path / "run"
    result = finetune.train(
        workshop / "recipe.yaml", methods, f"output_dir={run}", "train.max_steps=3", "train.save_steps=3"
    )
    assert result.status == "completed"
    for page in (run / "final" / "README.md", run / "report.html"):
        assert "mhr.n_skills" in page.read_text()
        assert "id3.budget" in page.read_text()
    assert 'task="yes"' in (run / "final" / "README.md").read_text()
    assert any("--task yes" in command for command, _ in next_commands(run, result.record))
    tuned, _ = load_tuned(run, task="yes", dtype="float32")
    assert torch.isfinite(tuned(IDS).logits).all()


def refuses(workshop: Path, tmp_path: Path, *overrides: str) -> Any:
    with pytest.raises(FinetuneError) as caught:
        finetune.train(workshop / "recipe.yaml", f"output_dir={tmp_path / 'run'}", *overrides)
    assert not (tmp_path / "run").exists()
    return caught.value


def test_what_cannot_be_routed_is_refused_before_training(workshop: Path, tmp_path: Path) -> None:
    error = refuses(workshop, tmp_path, "method.tasks=[always_no, yess]")
    assert isinstance(error, DataError)
    assert "no router is trained for the task 'yes'" in str(error)
    assert "yess" in error.problems[0].near
    error = refuses(workshop, tmp_path, "eval.tasks=[cron]")
    assert "eval.tasks" in str(error)
    few = f"{{path: {workshop / 'few.jsonl'}, {COLUMNS}}}"
    (workshop / "few.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    error = refuses(workshop, tmp_path, f"data.eval={few}", "eval.tasks=[]")
    assert "data.eval" in str(error)
    error = refuses(workshop, tmp_path, f"data.calibration={few}", "eval.tasks=[]", "data.eval=null")
    assert "data.calibration" in str(error)
    (workshop / "other").mkdir(exist_ok=True)
    shutil.copy(workshop / "yes.jsonl", workshop / "other" / "yes.jsonl")
    same = ", ".join(f"{{path: {workshop / path}, {COLUMNS}}}" for path in ("yes.jsonl", "other/yes.jsonl"))
    error = refuses(workshop, tmp_path, f"data.train=[{same}]", "eval.tasks=[]")
    assert "would be the one task 'yes'" in str(error)
    error = refuses(workshop, tmp_path, "data.packing=true")
    assert isinstance(error, CapabilityError)
    assert "data.packing: false" in str(error)


def test_a_task_is_asked_of_what_tells_tasks_apart(run: Path, workshop: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown task 'yse'"):
        load_tuned(run, task="yse")
    with pytest.raises(DataError, match="--task"):
        merge_run(run, tmp_path / "merged")
    with pytest.raises(CapabilityError, match="serve one task"):
        export_run(run, tmp_path / "lora", "peft")
    with pytest.raises(CapabilityError, match="does not tell tasks apart"):
        load_tuned(workshop / "model", task="yes")
