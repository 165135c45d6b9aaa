"""Says of one key what it means, what it is set to, and where that was said."""

from __future__ import annotations

from typing import Any

from finetune.config.catalogue import Key, known_keys
from finetune.config.load import LoadedRecipe
from finetune.config.method_section import method_configs
from finetune.config.scorer_section import scorer_configs
from finetune.core.errors import ConfigError, list_choices, nearest
from finetune.core.source_fields import REQUIRED

__all__ = ["Explanation", "explain"]


class Explanation(dict[str, Any]):
    """``key``, ``value``, ``origin``, ``default``, ``type`` and ``help`` of one key."""

    def __str__(self) -> str:
        return "\n".join(f"{label:<8} {text}" for label, text in self.items() if text != "")


def explain(loaded: LoadedRecipe, name: str) -> Explanation:
    """Returns what there is to say about the key ``name``.

    Raises:
        ConfigError: There is no such key.
    """
    keys = known_keys(method_configs(loaded.recipe.method), scorer_configs(loaded.recipe.select.scorer))
    key = keys.get(name) or keys.get(".".join(part for part in name.split(".") if not part.isdigit()))
    if key is None:
        leaves = {known.rpartition(".")[2]: known for known in reversed(keys)}
        raise ConfigError(
            f"there is no key {name!r}",
            want=list_choices(keys, more="`finetune validate --schema`"),
            near=nearest(name, keys) or leaves.get(nearest(name.rpartition(".")[2], leaves), ""),
        )
    return Explanation(
        key=name,
        value=loaded.value(name) if loaded.is_given(name) else _default_value(loaded, name, key),
        origin=loaded.origin(name),
        default="required" if key.default is REQUIRED else key.default,
        type=key.type,
        help=key.help,
    )


def _default_value(loaded: LoadedRecipe, name: str, key: Key) -> Any:
    value = loaded.value(name)
    return key.default if value is None and key.default is not REQUIRED else value
