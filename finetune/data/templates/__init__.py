"""Chat templates: the tokenizer's own, the shipped ones, or a Jinja file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.core.errors import DataError, list_choices, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["resolve_template", "template_names"]

_SUFFIX = ".jinja"


def template_names() -> list[str]:
    """Returns the names of the shipped templates."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))


def resolve_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the text of a chat template.

    Args:
        name: ``tokenizer``, the name of a shipped template, or the path of a ``.jinja`` file.
        tokenizer: Whose own template ``tokenizer`` means.

    Raises:
        DataError: The tokenizer has no template, the file does not exist, or the name is unknown.
    """
    where = "data.chat_template"
    if name == "tokenizer":
        if not isinstance(tokenizer.chat_template, str):
            raise DataError(
                "the tokenizer has no chat template",
                where=where,
                got=tokenizer.name_or_path,
                want=f"{list_choices(template_names())}, or the path of a .jinja file",
                fix="data.chat_template: chatml",
            )
        return tokenizer.chat_template
    if name.endswith(_SUFFIX):
        if not Path(name).is_file():
            raise DataError("the chat template does not exist", where=where, got=name)
        return Path(name).read_text(encoding="utf-8")
    if name not in template_names():
        raise DataError(
            f"unknown chat template {name!r}",
            where=where,
            want=f"tokenizer, {list_choices(template_names())}, or the path of a .jinja file",
            near=nearest(name, ["tokenizer", *template_names()]),
        )
    return resources.files(__name__).joinpath(name + _SUFFIX).read_text(encoding="utf-8")
