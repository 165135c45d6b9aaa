"""Errors, the registry, whole files, and fields read from source."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from finetune.core.errors import ConfigError, Problem, RefusedError, RegistryError, list_choices, nearest
from finetune.core.files import (
    MANIFEST,
    incomplete_reason,
    replaced_file,
    replaced_folder,
    write_json,
    write_manifest,
    write_text,
)
from finetune.core.registry import Registry
from finetune.core.source_fields import REQUIRED, package_folder, read_fields


def test_an_error_says_its_parts_in_order_and_leaves_out_the_empty_ones() -> None:
    error = ConfigError("unknown key 'methd'", where="r.yaml:3", near="method")
    assert str(error) == "unknown key 'methd'\n  at   r.yaml:3\n  near method"
    assert (error.what, error.near, error.fix) == ("unknown key 'methd'", "method", "")
    assert (ConfigError.exit_code, RefusedError.exit_code) == (2, 3)


def test_several_problems_are_numbered_and_counted() -> None:
    error = ConfigError.of([Problem("a", fix="x"), Problem("b")])
    assert isinstance(error, ConfigError)
    assert str(error) == "1) a\n  fix  x\n2) b\n2 problems; nothing was started."


def test_nearest_and_choices() -> None:
    assert nearest("qkv_proj", ["q_proj", "down_proj"]) == "q_proj"
    assert nearest("zzz", ["q_proj"]) == ""
    assert nearest("lroa", ["road", "lora"]) == nearest("lroa", ["lora", "road"]) == "lora"
    names = [f"n{i}" for i in range(14)]
    assert list_choices(names[:2]) == "n0, n1"
    assert list_choices(names, more="finetune ls").endswith("n11 and 2 more; finetune ls lists them")


def test_a_registry_takes_each_name_once_and_a_dash_for_an_underscore() -> None:
    registry: Registry[int] = Registry("method", "finetune ls methods")
    registry.register("ln_tuning")(1)
    assert registry.get("LN-tuning") == 1
    assert "ln-tuning" in registry
    assert list(registry) == ["ln_tuning"]
    with pytest.raises(RegistryError, match="twice"):
        registry.register("ln_tuning")(2)
    with pytest.raises(RegistryError, match="canonical"):
        registry.register("Ln-Tuning")
    with pytest.raises(RegistryError) as caught:
        registry.get("ln_tunign")
    assert caught.value.near == "ln_tuning"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_text(path, "old")

    def fail() -> None:
        with replaced_file(path) as beside:
            beside.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_text() == "old"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.txt"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failed_folder_leaves_the_old_folder_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "final"
    with replaced_folder(folder) as beside:
        (beside / "a").write_text("1")

    def fail() -> None:
        with replaced_folder(folder) as beside:
            (beside / "b").write_text("2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [entry.name for entry in folder.iterdir()] == ["a"]
    with replaced_folder(folder) as beside:
        (beside / "c").write_text("3")
    assert [entry.name for entry in folder.iterdir()] == ["c"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["final"]


def test_a_manifest_finds_every_kind_of_damage(tmp_path: Path) -> None:
    write_json(tmp_path / "sub" / "a.json", {"x": 1})
    assert incomplete_reason(tmp_path) == f"{MANIFEST} is missing"
    write_manifest(tmp_path)
    assert incomplete_reason(tmp_path) == ""
    file = tmp_path / "sub" / "a.json"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert "bytes, not" in incomplete_reason(tmp_path)
    file.write_bytes(content.replace(b"1", b"2"))
    assert "another content" in incomplete_reason(tmp_path)
    file.unlink()
    assert incomplete_reason(tmp_path) == "sub/a.json is missing"
    (tmp_path / MANIFEST).write_text("{")
    assert incomplete_reason(tmp_path) == f"{MANIFEST} is unreadable"


def test_fields_from_source_are_those_of_the_imported_class() -> None:
    import transformers

    folder = package_folder("transformers")
    assert folder is not None
    read = read_fields(folder / "training_args.py", "TrainingArguments")
    imported = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments)}
    assert list(read) == list(imported)
    for name in ("learning_rate", "per_device_train_batch_size", "num_train_epochs", "max_grad_norm"):
        assert read[name].default == imported[name].default
    assert read["learning_rate"].help


def test_a_field_without_default_is_required(tmp_path: Path) -> None:
    source = tmp_path / "m.py"
    source.write_text(
        "class C:\n    a: int\n    b: 'str | None' = None\n    kind: ClassVar[int] = 1\n"
        "    c: list = field(default_factory=list, metadata={'help': 'x ' 'y'})\n"
    )
    fields = read_fields(source, "C")
    assert list(fields) == ["a", "b", "c"]
    assert (fields["a"].default, fields["b"].annotation, fields["c"].help) == (REQUIRED, "str | None", "x y")
    assert package_folder("no_such_package_here") is None
