"""The search for layers and modules: down the tree, with real runs, interrupted and gone on with."""

from __future__ import annotations

import copy
import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from finetune.config.load import load_recipe
from finetune.core.errors import CapabilityError, ConfigError, FinetuneError, RefusedError
from finetune.methods.primitives.row_mask import find_rows
from finetune.search.percent import percent
from finetune.search.run import SearchResult, search
from finetune.search.tree import ATTENTION, FEED_FORWARD, Node, Scores, search_tree
from finetune.training.inflight import InFlightChecks
from support.tiny import save_tiny_model, tiny_llama, token_batch


class TestTree:
    def test_tries_halves_then_quarters_then_parts_then_projections(self) -> None:
        tried = search_tree(lambda node: Scores(-len(node.modules), -abs(node.start - 50)))
        everything = ATTENTION + FEED_FORWARD
        assert [found.node for found in tried] == [
            *(Node(start, start + 50, everything) for start in (0, 25, 50)),
            *(Node(start, start + 25, everything) for start in (50, 75)),
            *(Node(50, 75, modules) for modules in (ATTENTION, FEED_FORWARD)),
            *(Node(50, 75, (module,)) for module in FEED_FORWARD),
        ]

    def test_attention_is_not_taken_apart(self) -> None:
        tried = search_tree(lambda node: Scores(node.modules == ATTENTION, 0))
        assert [found.node.modules for found in tried[5:]] == [ATTENTION, FEED_FORWARD]

    def test_a_wider_beam_tries_each_candidate_once(self) -> None:
        tried = [found.node for found in search_tree(lambda node: Scores(0, 0), beam=3)]
        assert len(set(tried)) == len(tried)
        assert {(node.start, node.stop) for node in tried[3:7]} == {(0, 25), (25, 50), (50, 75), (75, 100)}

    def test_weights_decide_and_a_spent_budget_ends_it(self) -> None:
        scores = {0: Scores(10, 0), 25: Scores(0, 11), 50: Scores(6, 4)}
        calls = iter(range(3))
        found = search_tree(lambda node: scores[node.start] if next(calls, None) is not None else None, weights=(2, 1))
        assert [one.utility for one in found] == [20, 11, 16]

    def test_finds_a_planted_range_in_a_model(self) -> None:
        """One projection of one quarter is damaged; a candidate is repaired, and pays for what it touches."""
        sound = tiny_llama(layers=8)
        damaged = copy.deepcopy(sound)
        planted = Node(25, 50, ("up",))
        with torch.no_grad():
            for name in _weights(damaged, planted):
                damaged.get_parameter(name).normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
        rows = token_batch(4, 12)
        with torch.no_grad():
            teacher = sound(input_ids=rows).logits.log_softmax(-1).flatten(0, 1)

        @torch.no_grad()
        def score(node: Node) -> Scores:
            model = copy.deepcopy(damaged)
            touched = _weights(model, node)
            for name in touched:
                model.get_parameter(name).copy_(sound.get_parameter(name))
            student = model(input_ids=rows).logits.log_softmax(-1).flatten(0, 1)
            distance = nn.functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
            share = sum(model.get_parameter(name).numel() for name in touched) / model.num_parameters()
            return Scores(100 * float(torch.exp(-distance)), 100 * (1 - share))

        tried = search_tree(score)
        assert max(tried, key=lambda found: found.utility).node == planted


def _weights(model: Any, node: Node) -> list[str]:
    every = frozenset(name for name, _ in model.named_parameters())
    return [f"{rows.layer}.weight" for rows in find_rows(model, node.layers, list(node.modules), every)]  # type: ignore[arg-type]


def test_results_in_percent() -> None:
    results = [
        {"task": "a", "metric": "exact_match", "value": 0.5},
        {"task": "b", "metric": "loss", "value": math.log(4)},
        {"task": "b", "metric": "perplexity", "value": 4.0},
        {"task": "c", "metric": "acc", "value": 0.2},
        {"task": "c", "metric": "acc_norm", "value": 0.4},
        {"task": "d", "metric": "word_perplexity", "value": 4.0},
        {"task": "lm-eval:e", "metric": "bits_per_byte", "value": 2.0},
    ]
    assert percent(results, ["a"]) == pytest.approx(50)
    assert percent(results, ["a", "b"]) == pytest.approx(37.5)
    assert percent(results, ["c"]) == pytest.approx(30)
    assert percent(results, ["d"]) == pytest.approx(25)
    assert percent(results, ["lm-eval:e"]) == pytest.approx(25)
    with pytest.raises(ConfigError, match="no result"):
        percent(results, ["e"])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    save_tiny_model(folder / "model", layers=4)
    for name in ("task", "general"):
        rows = [{"prompt": f"{name} {i}", "completion": "yes" if i % 2 else "no"} for i in range(12)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(
        f"model: {{name_or_path: {folder / 'model'}, dtype: float32, device: cpu}}\n"
        "method: {name: cofitune, soft_mask: false}\n"
        f"data: {{train: {folder / 'task.jsonl'}}}\n"
        "train: {per_device_train_batch_size: 4, learning_rate: 1e-2, max_steps: 4, save_steps: 2}\n"
        f"eval: {{tasks: ['loss:{folder / 'task.jsonl'}']}}\n"
        f"search: {{versatility: ['loss:{folder / 'general.jsonl'}']}}\n"
        "output_dir: unset\n"
    )
    return folder / "recipe.yaml"


def run(recipe: Path, folder: Path, *overrides: str, **options: bool) -> SearchResult:
    return search(load_recipe([str(recipe)], [f"output_dir={folder}", *overrides]), **options)


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return run(recipe, tmp_path_factory.mktemp("searches") / "whole")


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "search.jsonl").read_text().splitlines()]


def test_a_search_tries_the_tree_with_real_runs_and_keeps_the_best(whole: SearchResult) -> None:
    assert whole.ended == "complete"
    assert len(whole.tried) in (7, 9)  # attention has no parts
    log = log_of(whole.folder)
    assert [line["utility"] for line in log] == [found.utility for found in whole.tried]
    assert all(line["gain"] > 0 for line in log)  # four steps on the task itself
    assert log[0]["retention"] == pytest.approx(log[0]["versatility"] / whole.base.versatility)
    assert log[0]["trained"] > log[3]["trained"] > log[-1]["trained"]
    assert whole.best is not None
    kept = [folder.parent for folder in whole.folder.glob("*/final")]
    assert kept == [whole.run_of(whole.best.node)]
    assert not list(whole.folder.glob("*/checkpoint-*"))


def test_a_search_that_was_stopped_goes_on_to_the_same_end(recipe: Path, whole: SearchResult, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    first = run(recipe, folder, "search.max_runs=2")
    assert (first.ended, len(first.tried)) == ("budget spent", 2)
    with pytest.raises(RefusedError, match="earlier search"):
        run(recipe, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/run.json")}
    with pytest.raises(RefusedError, match="another recipe"):
        run(recipe, folder, "search.speciality_weight=5", resume=True)  # the best of before has lost its weights
    second = run(recipe, folder, "search.max_steps=16", resume=True)
    assert (second.ended, len(second.tried)) == ("budget spent", 4)
    with pytest.raises(RefusedError, match="another recipe"):
        run(recipe, folder, "train.learning_rate=1e-3", resume=True)
    last = run(recipe, folder, resume=True)
    assert {path: path.stat().st_mtime_ns for path in before} == before  # not trained again
    assert last.tried == whole.tried
    assert [folder.parent.name for folder in folder.glob("*/final")] == [whole.best.node.name]  # type: ignore[union-attr]


def test_a_run_that_was_interrupted_goes_on_from_its_checkpoint(
    recipe: Path, whole: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "search"
    plain, steps = InFlightChecks.on_step_end, []

    def with_signal(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        plain(self, args, state, control, **rest)
        steps.append(state.global_step)
        if len(steps) == 6:  # the second step of the second run
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(InFlightChecks, "on_step_end", with_signal)
    first = run(recipe, folder)
    assert (first.ended, first.exit_code, len(first.tried)) == ("interrupted", 130, 1)
    last = run(recipe, folder, resume=True)
    assert steps[:8] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert last.tried == whole.tried


def test_what_a_search_needs_is_said_before_anything_is_loaded(recipe: Path, tmp_path: Path) -> None:
    for overrides, error, part in [
        (["method={name: lora}"], CapabilityError, "cofitune"),
        (["search.versatility=[]"], ConfigError, "versatility"),
        (["eval.tasks=[]"], ConfigError, "speciality"),
        (["search.speciality=[cron]", "search.versatility=[cron]"], ConfigError, "told apart"),
        (["search.versatility=['loss:a/x.jsonl','loss:b/x.jsonl']"], ConfigError, "told apart"),
        (["model.name_or_path=./missing"], ConfigError, "missing"),
        (["search.versatility=['loss:absent.jsonl']"], FinetuneError, "absent.jsonl"),
        (["search.versatility=[crom]"], ConfigError, "cron"),
    ]:
        with pytest.raises(error) as caught:
            run(recipe, tmp_path / "none", *overrides)
        assert part in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_a_folder_of_something_else_is_left_alone(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "search.yaml").write_text("a recipe")
    with pytest.raises(FinetuneError, match="not a search's"):
        run(recipe, tmp_path, overwrite=True)
    with pytest.raises(FinetuneError, match="is a file"):
        run(recipe, tmp_path / "notes.txt", overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_overwriting_takes_away_what_the_search_has_made_and_only_once_all_is_checked(
    recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "search"
    run(recipe, folder, "search.max_runs=1")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FinetuneError):
        run(recipe, folder, "data.train=absent.jsonl", overwrite=True)
    assert log_of(folder)
    found = run(recipe, folder, "search.max_runs=1", "train.max_steps=2", overwrite=True)
    assert found.tried
    assert log_of(folder)[0]["steps"] == 2
    assert (folder / "notes.txt").read_text() == "mine"
