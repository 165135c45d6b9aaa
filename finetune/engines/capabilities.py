"""Which method trains under which engine: what is refused before weights load, and the table that the docs show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.core.errors import CapabilityError

if TYPE_CHECKING:
    from finetune.methods import Method

__all__ = ["STRATEGIES", "require_supported", "unsupported"]

STRATEGIES = ("single", "ddp", "fsdp", "hsdp")


def unsupported(method: Method | type[Method], strategy: str) -> str:
    """Returns why a method does not train under an engine, or an empty string where it does."""
    return method.whole_weights if strategy in ("fsdp", "hsdp") else ""


def require_supported(method: Method, strategy: str) -> None:
    """Refuses what cannot train, naming the nearest engine that does.

    Raises:
        CapabilityError: The method does not train under ``strategy``.
    """
    reason = unsupported(method, strategy)
    if reason:
        others = [name for name in STRATEGIES[1:] if not unsupported(method, name)]
        raise CapabilityError(
            f"{method.name} does not train with {strategy}: {reason}",
            where="engine.strategy",
            got=strategy,
            want=", ".join(others),
            fix=f"engine.strategy: {others[0]}",
        )
