"""Which method trains under which engine: what is refused before weights load, and the table that the docs show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.core.errors import CapabilityError

if TYPE_CHECKING:
    from finetune.methods import Method

__all__ = ["STRATEGIES", "require_supported", "unsupported"]

STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "zero-1", "zero-2", "zero-3")
"""Of DeepSpeed, the stages of ZeRO."""

_FIX = {f"zero-{stage}": f"engine.deepspeed.stage: {stage}" for stage in (1, 2, 3)}


def unsupported(method: Method | type[Method], strategy: str) -> str:
    """Returns why a method does not train under an engine, or an empty string where it does."""
    if strategy in ("single", "ddp"):
        return ""
    if strategy in ("fsdp", "hsdp"):
        return method.whole_weights
    if method.takes_turns:
        return "its parameters take turns, and ZeRO lays out the optimizer state of all of them once"
    if method.own_optimizer or strategy != "zero-3":
        return method.own_optimizer
    if method.kind == "delta":
        return "it writes into weights of which ZeRO-3 leaves each process a part"
    return method.whole_weights


def require_supported(method: Method, strategy: str) -> None:
    """Refuses what cannot train, naming the nearest engine that does.

    Raises:
        CapabilityError: The method does not train under ``strategy``.
    """
    reason = unsupported(method, strategy)
    if reason:
        others = [name for name in STRATEGIES[1:] if not unsupported(method, name)]
        family = "zero" if strategy.startswith("zero") else "ddp"
        nearest = next((name for name in reversed(others) if name.startswith(family)), others[0])
        raise CapabilityError(
            f"{method.name} does not train with {strategy}: {reason}",
            where="engine.strategy",
            got=strategy,
            want=", ".join(others),
            fix=_FIX.get(nearest, f"engine.strategy: {nearest}"),
        )
