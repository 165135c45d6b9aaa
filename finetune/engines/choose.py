"""Which engine a recipe means: a pure function of its ``engine`` section, the processes and the model's size."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from finetune.core.errors import CapabilityError, ConfigError
from finetune.engines.capabilities import require_supported

if TYPE_CHECKING:
    from finetune.config.schema import EngineSection
    from finetune.engines.engine import Engine
    from finetune.methods import Method

__all__ = ["choose_engine", "resolve_strategy"]

_ROOM = 0.8
"""Share of a device's memory up to which the weights alone leave enough for a step."""


def resolve_strategy(section: EngineSection, processes: int, *, weights: int, room: int) -> str:
    """Returns ``single``, ``ddp``, ``fsdp``, ``hsdp`` or ``deepspeed``.

    Args:
        section: Of the recipe.
        processes: How many train, on all machines.
        weights: Bytes of the model's weights.
        room: Bytes that one process may take on its device.

    Raises:
        ConfigError: One process is to be several, or several one.
    """
    strategy = section.strategy
    if processes == 1 and strategy in ("ddp", "fsdp", "hsdp", "deepspeed"):
        raise ConfigError(
            f"{strategy} shares a model among processes, and there is one",
            where="engine.strategy",
            got=strategy,
            fix="finetune train RECIPE --nproc N, or engine.strategy: auto",
        )
    if processes > 1 and strategy == "single":
        raise ConfigError(
            "several processes would train the same model, each on its own",
            where="engine.strategy",
            got=f"single, {processes} processes",
            fix="engine.strategy: auto, or no --nproc",
        )
    if strategy != "auto":
        return strategy
    if processes == 1:
        return "single"
    if weights <= _ROOM * room:
        return "ddp"
    return "fsdp" if _processes_here() in (1, processes) else "hsdp"


def choose_engine(strategy: str, section: EngineSection, processes: int, method: Method) -> Engine:
    """Returns the engine of a strategy that :func:`resolve_strategy` returned.

    Raises:
        CapabilityError: The method does not train so.
        ConfigError: The processes do not divide into groups of ``engine.shard_size``.
    """
    require_supported(method, strategy if strategy != "deepspeed" else f"zero-{section.deepspeed.stage}")
    from finetune.engines.engine import Engine
    from finetune.engines.replicated import Replicated
    from finetune.engines.sharded import Sharded

    if section.gather_dtype == "int8":
        _require_frozen(method, strategy)
    if strategy in ("fsdp", "hsdp"):
        return Sharded(
            processes,
            shard_size=processes if strategy == "fsdp" else _shard_size(section.shard_size, processes),
            offload=section.offload.weights == "cpu",
            int8=section.gather_dtype == "int8",
        )
    if strategy == "deepspeed":
        from finetune.engines.zero import Zero
        from finetune.engines.zero_config import read_config

        return Zero(
            processes,
            stage=section.deepspeed.stage,
            config=read_config(section.deepspeed.config),
            offload_weights=section.offload.weights == "cpu",
            offload_optimizer=section.offload.optimizer == "cpu",
        )
    return Replicated(processes) if strategy == "ddp" and method.takes_turns else Engine(processes)


def _require_frozen(method: Method, strategy: str) -> None:
    if strategy not in ("fsdp", "hsdp") or method.writes_base or method.shards:
        raise CapabilityError(
            "weights are gathered as int8 where they are sharded and none of them ever changes",
            where="engine.gather_dtype",
            got=f"{method.name} with {strategy}",
            want="an adapter (lora, mos, ...) with fsdp or hsdp",
            fix="engine.gather_dtype: null",
        )


def _shard_size(given: int | None, processes: int) -> int:
    size = given or _processes_here()
    if not 1 < size < processes or processes % size:
        raise ConfigError(
            "the processes do not divide into groups that each share a copy of the model",
            where="engine.shard_size",
            got=f"{size} of {processes} processes",
            want="a divisor of them, more than 1 and fewer than all",
            fix="engine.strategy: fsdp for one group",
        )
    return size


def _processes_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
