"""What PEFT's tuners are called and which fields they take, read from the source of the installed PEFT.

Importing PEFT takes seconds; its source says the same in milliseconds, always for the installed version. A tuner that a
newer PEFT adds is listed without an edit here.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional, Union

from pydantic import Field, create_model

from finetune.core.source_fields import REQUIRED, SourceField, package_folder, read_fields
from finetune.methods.base import MethodConfig

__all__ = ["PRECISION", "PeftTunerSource", "make_config", "read_peft_tuners"]

_DERIVED = frozenset(
    (
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "token_dim",
        "num_transformer_submodules",
        "num_attention_heads",
        "num_layers",
        "runtime_config",
    )
)
"""Fields that follow from the model, the task or PEFT itself."""

_PLACEHOLDER = "["
"""A literal such as ``pissa_niter_[number of iters]`` stands for many strings."""


PRECISION: dict[str, Any] = {
    "trainable_dtype": (
        Literal["float32", "base"],
        Field(default="float32", description="What the optimizer holds: float32, or the dtype of the base's weights."),
    ),
    "compute_dtype": (
        Literal["base", "trainable"],
        Field(
            default="base",
            description="What the adapter computes in: the base's dtype, in which its parameters are cast once per "
            "pass, or its own, as stock PEFT does, which keeps wide activations of a 16-bit base.",
        ),
    ),
}
"""Fields of every tuner besides PEFT's own."""


class PeftTunerSource(NamedTuple):
    """A tuner as ``register_peft_method`` spells it.

    Attributes:
        name: PEFT's name, lower case.
        config_class: Name of its config class.
        config_file: The module that defines the config class.
    """

    name: str
    config_class: str
    config_file: Path


@functools.cache
def read_peft_tuners() -> dict[str, PeftTunerSource]:
    """Returns the tuners that the installed PEFT registers, by name, in alphabetical order."""
    peft = package_folder("peft")
    found = {}
    for file in sorted(peft.glob("tuners/*/__init__.py")) if peft else ():
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "register_peft_method":
                given = {keyword.arg: keyword.value for keyword in call.keywords}
                name = str(ast.literal_eval(given["name"]))
                found[name] = PeftTunerSource(name, ast.unparse(given["config_cls"]), file.with_name("config.py"))
    return found


def make_config(
    source: PeftTunerSource, *, fixed: Mapping[str, Any], defaults: Mapping[str, Any]
) -> type[MethodConfig]:
    """Returns a config with PEFT's own fields, and those of :data:`PRECISION`.

    Args:
        source: The tuner.
        fixed: Fields that the method decides and a recipe cannot give.
        defaults: Our defaults of fields where PEFT has none.
    """
    fields: dict[str, Any] = {}
    for field in _all_fields(source.config_file, source.config_class):
        if field.name not in _DERIVED and field.name not in fixed:
            default = defaults.get(field.name, ... if field.default is REQUIRED else field.default)
            kind = _resolve(field.annotation)
            text = field.help or f"As in PEFT's {source.config_class}."
            fields[field.name] = (kind | None if default is None else kind, Field(default, description=text))
    return create_model(source.config_class, __base__=MethodConfig, __module__=__name__, **fields, **PRECISION)


def _all_fields(file: Path, class_name: str) -> Iterator[SourceField]:
    """Yields the fields of a dataclass and of its bases inside PEFT, the class's own spelling of each."""
    merged: dict[str, SourceField] = {}
    for path, name in reversed(list(_with_bases(file, class_name))):
        merged |= read_fields(path, name)
    yield from merged.values()


def _with_bases(file: Path, class_name: str) -> Iterator[tuple[Path, str]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    defined = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    imported = {alias.name: node for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    if class_name not in defined:
        return
    yield file, class_name
    for base in map(ast.unparse, defined[class_name].bases):
        if base in defined:
            yield from _with_bases(file, base)
        elif base in imported and (module := imported[base].module or "").startswith("peft"):
            yield from _with_bases(_module_file(module), base)


def _module_file(module: str) -> Path:
    """Returns the file of a module of PEFT; for the package of a tuner, that of its configs."""
    peft = package_folder("peft")
    assert peft is not None
    path = peft.joinpath(*module.split(".")[1:])
    return path / "config.py" if path.is_dir() else path.with_suffix(".py")


class _Subscript:
    """Something of which an annotation takes an item: ``Literal["a", "b"]``."""

    def __init__(self, item: Callable[[Any], Any]) -> None:
        self._item = item

    def __getitem__(self, item: Any) -> Any:
        return self._item(item)


def _literal(values: Any) -> Any:
    values = values if isinstance(values, tuple) else (values,)
    return str if any(_PLACEHOLDER in str(value) for value in values) else Literal[values]


_PLAIN = {
    **{kind.__name__: kind for kind in (bool, int, float, str, dict, list)},
    "Optional": Optional,
    "Union": Union,
    "Literal": _Subscript(_literal),
    # YAML and JSON have lists only.
    "tuple": _Subscript(lambda _: list[Any]),
}


def _resolve(annotation: str) -> Any:
    """Returns the type that an annotation of PEFT's source means, ``Any`` for every class that is not plain."""
    return eval(annotation, {"__builtins__": {}}, defaultdict(lambda: Any, _PLAIN))
