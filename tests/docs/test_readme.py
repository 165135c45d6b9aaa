"""The code of the README and the docs runs, and the commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny import save_tiny_model, tiny_llama, token_batch

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def blocks(name: str) -> str:
    return "\n".join(_BLOCK.findall((ROOT / name).read_text(encoding="utf-8")))


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {
        "MODEL": str(save_tiny_model(tmp_path / "model")),
        "ROWS": [{"input_ids": row, "labels": row} for row in token_batch(4, 8)],
    }
    exec(blocks("README.md"), names)
    tuned, plain = names["tuned"], names["plain"]
    assert type(tuned) is type(plain)
    assert (tmp_path / "runs/mine/learned/delta.safetensors").is_file()


def test_the_python_of_the_page_on_adapters_runs() -> None:
    names = {"model": tiny_llama()}
    exec(blocks("docs/adapters.md"), names)
    assert names["model"].active_peft_config.peft_type == "SHARDS"


def test_the_python_of_the_page_on_zeroth_order_methods_runs() -> None:
    names = {"model": tiny_llama(), "ids": token_batch(2, 8)}
    exec(blocks("docs/zeroth-order.md"), names)
    assert names["method"].summary().name == "lozo"


def test_the_python_of_the_page_on_offloading_runs(tmp_path: Path) -> None:
    names = {"MODEL": str(save_tiny_model(tmp_path / "model"))}
    exec(blocks("docs/offload.md"), names)
    assert names["model"](token_batch(1, 4)).logits.isfinite().all()
    assert names["streamer"].traffic().bytes > 0
    names["streamer"].remove()


def test_the_method_in_the_docs_is_complete() -> None:
    import finetune
    from finetune.methods import METHODS

    exec(blocks("docs/methods.md"), {"__name__": "finetune.methods.freezing.norms_and_head"})
    try:
        method = finetune.method("norms_and_head")
        method.attach(tiny_llama(tied=False))
        assert {name.rpartition(".")[0] for name in method.trained_parameters()} >= {"lm_head", "model.norm"}
    finally:
        del METHODS._entries["norms_and_head"]  # other tests list the registry


def test_the_python_of_data_selection_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    import finetune
    from finetune.data_selection import SCORERS, build_scorer, discover
    from support.chat_server import chat_server, completion
    from support.pools import PAIRS, examples
    from support.tiny import tiny_tokenizer

    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    rows = datasets.Dataset.from_list([{"prompt": asked, "completion": said} for asked, said in PAIRS])
    names = {"MODEL": str(save_tiny_model(tmp_path / "model")), "DATASET": rows, "finetune": finetune}
    discover()
    with chat_server(lambda content: completion("[Better answer]\nevery day at noon")) as (url, _):
        names["TEACHER"] = {"endpoint": url, "model": "teacher"}
        exec(blocks("docs/data-selection.md"), names)
    try:
        assert names["better"].column_names == ["messages", "origin", "id", "ifd", "r_ifd"]
        assert 0 < len(names["kept"]) < len(rows)
        pool = examples(tiny_tokenizer())
        assert build_scorer({"name": "shortest"}).score(pool[0]).value == -pool[0].answer_tokens
    finally:
        del SCORERS._entries["shortest"]  # other tests list the registry


@pytest.mark.integration
def test_every_command_in_the_readme_names_a_verb_and_options_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    commands = re.findall(r"finetune ((?:data )?[a-z]+)((?: [^#\n`]*)?)", text)
    used: dict[str, set[str]] = {}
    for verb, rest in commands:
        used.setdefault(verb, set()).update(re.findall(r"--[a-z-]+", rest))
    for verb in ("train", "select", "eval", "chat", "merge", "export", "ls", "cp"):
        command = [sys.executable, "-m", "finetune", *verb.split(), "--help"]
        page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert not {option for option in used[verb] if option not in page}, verb
