"""Fine-tune language models with little memory: one registry of methods, any trainer, exact resume, stock exports."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune import adapters
    from finetune.api import load, method, reflect, select, train

__version__ = "0.1.0"
__all__ = ["__version__", "adapters", "load", "method", "reflect", "select", "train"]


def __getattr__(name: str) -> Any:
    if name == "adapters":
        return import_module("finetune.adapters")
    if name in __all__:
        return getattr(import_module("finetune.api"), name)
    raise AttributeError(f"module 'finetune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
