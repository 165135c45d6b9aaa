"""From files and overrides to one recipe: layers, origins, interpolation, and what is written back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.config.load import LoadedRecipe, load_recipe
from finetune.config.schema import Source
from finetune.config.shipped import list_recipes
from finetune.config.yaml12 import read_yaml
from finetune.core.errors import ConfigError, FinetuneWarning
from finetune.core.shipped import shipped_path

RECIPE = """\
model:
  name_or_path: bundled:smollm2-135m-instruct
method: {name: s2ft, ratio: 0.02, seed: 5}
data:
  train: shipped:quickstart/train.jsonl
train:
  learning_rate: 2e-4
  max_steps: 012
output_dir: out
"""

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)
    count = 0

    def to_file(text: str) -> str:
        nonlocal count
        count += 1
        Path(f"{count}.yaml").write_text(text, encoding="utf-8")
        return f"{count}.yaml"

    return to_file


def test_values_have_the_types_of_the_schema(write: Write) -> None:
    recipe = load_recipe([write(RECIPE)]).recipe
    assert recipe.train == {"learning_rate": 2e-4, "max_steps": 12}
    assert recipe.method == {"name": "s2ft", "ratio": 0.02, "seed": 5}
    assert recipe.data.train == [Source(path="shipped:quickstart/train.jsonl")]
    assert recipe.data.eval is None
    assert recipe.seed == 42


def test_later_recipes_win_maps_merge_and_lists_replace(write: Write) -> None:
    base = RECIPE + "eval: {tasks: [cron, other], limit: 3}\n"
    recipe = load_recipe([write(base), write("train: {max_steps: 7}\neval: {tasks: [cron]}\nengine:\n")]).recipe
    assert recipe.train == {"learning_rate": 2e-4, "max_steps": 7}
    assert (recipe.eval.tasks, recipe.eval.limit) == (["cron"], 3)


def test_overrides_win_over_files_and_each_origin_is_known(write: Write) -> None:
    overrides = ["train.max_steps=3", "--train.weight-decay=0.1", "~train.learning_rate", "data.train+=rows"]
    loaded = load_recipe([write(RECIPE)], overrides)
    assert loaded.recipe.train == {"max_steps": 3, "weight_decay": 0.1}
    assert [source.path for source in loaded.recipe.data.train] == ["shipped:quickstart/train.jsonl", "rows"]
    assert loaded.origin("train.max_steps") == "argument 1"
    assert loaded.origin("train.weight_decay") == "argument 2"
    assert loaded.origin("train.learning_rate") == "default"
    assert loaded.origin("method.ratio") == "1.yaml:3"
    assert loaded.origin("model.name_or_path") == "1.yaml:2"
    assert loaded.origin("seed") == "default"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.eval=0.1", 0.1),
        ("data.eval=20", 20),
        ("data.eval=rows", [Source(path="rows")]),
        ("data.eval={path: rows, split: test}", [Source(path="rows", split="test")]),
        ("data.eval=[a, {path: b, weight: 2}]", [Source(path="a"), Source(path="b", weight=2.0)]),
    ],
)
def test_held_out_rows_are_a_share_a_number_or_sources(write: Write, override: str, expected: object) -> None:
    held_out = load_recipe([write(RECIPE)], [override]).recipe.data.eval
    assert held_out == expected
    assert type(held_out) is type(expected)


@pytest.mark.parametrize("value", ["0", "0.0", "1.0", "-3", "1.5", "true"])
def test_other_amounts_of_held_out_rows_are_refused(write: Write, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe([write(RECIPE)], [f"data.eval={value}"])
    assert caught.value.where == "argument 1  data.eval"


def test_keys_of_another_method_that_a_file_gives_are_dropped_with_a_warning(write: Write) -> None:
    with pytest.warns(FinetuneWarning, match=r"method\.ratio.*no effect"):
        loaded = load_recipe([write(RECIPE)], ["method.name=lora"])
    assert loaded.recipe.method["name"] == "lora"
    assert "ratio" not in loaded.recipe.method
    assert any("method.ratio" in text for text in loaded.warnings)


@pytest.mark.parametrize("shorthand", ["method=lora", "--method=lora", "method.name=LoRA", "method={name: lora}"])
def test_a_method_is_chosen_in_several_ways(write: Write, shorthand: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FinetuneWarning)
        assert load_recipe([write(RECIPE)], [shorthand]).recipe.method["name"] == "lora"


@pytest.mark.filterwarnings("ignore::finetune.core.errors.FinetuneWarning")
def test_the_order_of_overrides_of_the_method_does_not_matter(write: Write) -> None:
    path = write(RECIPE)
    first = load_recipe([path], ["method.r=4", "method=lora"]).recipe.method
    assert first == load_recipe([path], ["method=lora", "method.r=4"]).recipe.method
    assert first["r"] == 4


@pytest.mark.filterwarnings("ignore::finetune.core.errors.FinetuneWarning")
def test_an_override_of_another_methods_key_is_an_error(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe([write(RECIPE)], ["method=lora", "method.ratio=0.5"])
    assert caught.value.where == "argument 2  method.ratio"


@pytest.mark.filterwarnings("ignore::finetune.core.errors.FinetuneWarning")
def test_a_later_recipe_may_change_the_method_too(write: Write) -> None:
    method = load_recipe([write(RECIPE), write("method: {name: lora, r: 4}")]).recipe.method
    assert (method["name"], method["r"], "ratio" in method) == ("lora", 4, False)


def test_methods_may_be_a_list(write: Write) -> None:
    loaded = load_recipe([write(RECIPE)], ["method=[{name: top-layers}, s2ft]", "method.1.ratio=0.5"])
    assert [entry["name"] for entry in loaded.recipe.method] == ["top_layers", "s2ft"]  # type: ignore[index]
    assert loaded.recipe.method[1]["ratio"] == 0.5  # type: ignore[index]


def test_only_the_environment_and_the_output_folder_are_filled_in(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATE", "3e-4")
    monkeypatch.setenv("TOKEN", "secret")
    overrides = [
        "train.learning_rate=${env:RATE}",
        "train.hub_token=${env:TOKEN}",
        "train.run_name=x-${output_dir}",
        "output_dir=runs/${env:TOKEN}",
    ]
    loaded = load_recipe([write(RECIPE)], overrides)
    assert loaded.recipe.train["learning_rate"] == 3e-4
    assert loaded.recipe.train["hub_token"] == "secret"
    assert loaded.recipe.train["run_name"] == "x-runs/secret"
    written = read_yaml(loaded.resolved_yaml(), "resolved").data
    assert written["train"]["hub_token"] == "${env:TOKEN}"
    assert "secret" not in loaded.given


def test_references_that_mean_nothing_are_reported_together(write: Write) -> None:
    overrides = ["train.learning_rate=${env:NO_SUCH_VARIABLE}", "train.run_name=${seed}", "output_dir=${output_dir}"]
    with pytest.raises(ConfigError) as caught:
        load_recipe([write(RECIPE)], overrides)
    assert [problem.where for problem in caught.value.problems] == [
        "argument 1  train.learning_rate",
        "argument 2  train.run_name",
        "argument 3  output_dir",
    ]


def test_the_resolved_recipe_has_every_key_and_is_read_back_from_anywhere(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = Path("rows.jsonl")
    rows.write_text("{}\n", encoding="utf-8")
    first = load_recipe([write(RECIPE)], ["data.train=rows.jsonl"])
    Path("resolved.yaml").write_text(first.resolved_yaml(), encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    second = load_recipe(["../resolved.yaml"])
    assert second.recipe.data.train[0].path == str(rows.absolute().parent.parent / "rows.jsonl")
    assert second.recipe.output_dir == str(tmp_path / "out")
    assert second.resolved() == read_yaml(first.resolved_yaml(), "resolved").data | {
        "data": second.resolved()["data"],
        "output_dir": second.recipe.output_dir,
    }
    assert set(read_yaml(first.resolved_yaml(), "resolved").data["method"]) > {"name", "ratio", "select"}


def test_keys_of_a_method_that_do_not_go_together_are_said_in_one_line(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe([write(RECIPE)], ["method={name: mos, r: 4, equiv_rank: 8}"])
    (problem,) = caught.value.problems
    assert problem.what == "private_rank 2 <= equiv_rank 8 <= r 4 does not hold"
    assert problem.where == "argument 1  method"
    with pytest.raises(ConfigError) as caught:
        load_recipe([write(RECIPE)], ["method={name: cofitune, modules: [up, up]}"])
    (problem,) = caught.value.problems
    assert (problem.where, problem.want) == ("argument 1  method.modules", "each may be named once")


def test_files_that_a_method_names_are_found_from_anywhere(write: Write, tmp_path: Path) -> None:
    for name in ("scores.json", "a.safetensors"):
        Path(name).write_text("", encoding="utf-8")
    methods = "[{name: spectrum, scores: scores.json}, {name: cofitune, importance: [a.safetensors, absent]}]"
    resolved = read_yaml(load_recipe([write(RECIPE)], [f"method={methods}"]).resolved_yaml(), "resolved").data
    assert resolved["method"][0]["scores"] == str(Path("scores.json").absolute())
    assert resolved["method"][1]["importance"] == [str(Path("a.safetensors").absolute()), "absent"]


def test_a_run_directory_means_the_recipe_that_it_ran(write: Write) -> None:
    Path("run").mkdir()
    Path("run/config.resolved.yaml").write_text(load_recipe([write(RECIPE)]).resolved_yaml(), encoding="utf-8")
    assert load_recipe(["run"]).origin("seed") == f"{Path('run/config.resolved.yaml')}:" + _line_of(
        "run/config.resolved.yaml", "seed: 42"
    )


def _line_of(path: str, text: str) -> str:
    return str(Path(path).read_text(encoding="utf-8").splitlines().index(text) + 1)


def test_what_was_given_is_kept_with_its_comments(write: Write) -> None:
    given = load_recipe([write("# why\n" + RECIPE), write("seed: 3 # because\n")], ["seed=4"]).given
    assert [word in given for word in ("# why", "# because", "# 1.yaml", "# seed=4")] == [True] * 4


@pytest.mark.parametrize("name", [recipe.name for recipe in list_recipes()])
def test_every_shipped_recipe_is_valid(name: str) -> None:
    data = "shipped:quickstart/train.jsonl"
    loaded = load_recipe([name], [f"data.train={data}"])
    assert isinstance(loaded, LoadedRecipe)
    assert not loaded.warnings
    assert loaded.origin("output_dir").startswith(f"shipped:{name}.yaml:")
    assert shipped_path(data).is_file()


def test_a_recipe_that_is_nowhere_is_answered_with_the_nearest(write: Write) -> None:
    path = write(RECIPE)
    near = {}
    for name in ("quickstrat", "lora/quikstart", "11.yaml", "nothing-like-it"):
        with pytest.raises(ConfigError) as caught:
            load_recipe([name])
        near[name] = caught.value.near
    assert near == {
        "quickstrat": "quickstart",
        "lora/quikstart": "lora/quickstart",
        "11.yaml": path,
        "nothing-like-it": "",
    }


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"# only a comment\n", "empty"),
        (b"- a\n", "mapping"),
        (b"text", "mapping"),
        ("model: x".encode("utf-16"), "UTF-8"),
    ],
)
def test_files_that_are_no_recipes(write: Write, content: bytes, word: str) -> None:
    Path("bad.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_recipe(["bad.yaml"])
    assert word in caught.value.what
    assert caught.value.where == "bad.yaml"


def test_a_byte_order_mark_and_windows_lines_do_no_harm(write: Write) -> None:
    Path("dos.yaml").write_bytes(b"\xef\xbb\xbf" + RECIPE.replace("\n", "\r\n").encode())
    assert load_recipe(["dos.yaml"]).recipe == load_recipe([write(RECIPE)]).recipe


def test_problems_of_all_files_and_overrides_are_reported_together(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe([write("a: 1\na: 2\n"), "no-such-recipe"], ["foo"])
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("~nothing", "nothing"),
        ("~train.nothing", "train.nothing"),
        ("seed.x=1", "seed is not a mapping"),
        ("model+=x", "model is a mapping"),
        ("method.x.y=1", "unknown key"),
    ],
)
def test_overrides_that_fit_nothing(write: Write, override: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe([write(RECIPE + "seed: 3\n")], [override])
    assert word in caught.value.what
    assert caught.value.where.startswith("argument 1")


def test_the_resolved_recipe_of_a_peft_tuner_trains(tmp_path: Path) -> None:
    """Its computed defaults read null in our schema, and PEFT takes no null for them."""
    from finetune.methods import build_method
    from support.tiny import tiny_llama

    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(load_recipe(["lora/quickstart"]).resolved_yaml(), encoding="utf-8")
    method = build_method(load_recipe([str(resolved)]).recipe.method)
    method.attach(tiny_llama())
    assert method.trained_parameters()
