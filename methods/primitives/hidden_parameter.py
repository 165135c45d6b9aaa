"""A trained parameter beside the base's weights that stock state dicts neither show nor miss.

The weights hold what it says already: a saved model has the base's keys, and loads without this package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["hide_parameter"]


def hide_parameter(
    module: nn.Module, leaf: str, name: str, follow: Callable[[], None]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Hides the parameter ``leaf`` of ``module`` until the handles are removed.

    Args:
        module: What holds it.
        leaf: Its name there.
        name: Its name in the whole model; a wrapper's names have a prefix.
        follow: Called after a ``load_state_dict`` of the whole model without it: the weights have the say.
    """
    hide, found = functools.partial(_hide, leaf), functools.partial(_follow, name, follow)
    return (
        module.register_state_dict_post_hook(hide),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(found),  # type: ignore[no-untyped-call]
    )


def _hide(leaf: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state.pop(f"{prefix}{leaf}", None)


def _follow(name: str, follow: Callable[[], None], module: nn.Module, incompatible: Any) -> None:
    own = [key for key in incompatible.missing_keys if f".{key}".endswith(f".{name}")]
    for key in own:
        incompatible.missing_keys.remove(key)
    if own:
        follow()
