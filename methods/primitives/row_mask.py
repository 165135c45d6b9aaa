"""CoFiTune's rows: which rows of which layers train, and the unit whose importance each follows (section 3.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from finetune.core.errors import TargetError
from finetune.methods.primitives.blocks import find_blocks
from finetune.methods.primitives.parameter_patterns import layer_range
from finetune.methods.primitives.projections import Kind, Projection, find_projections, out_features
from finetune.methods.primitives.unit_importance import Gate

__all__ = ["ProjectionRows", "find_rows", "gates_of", "row_importance"]

_UNITS: dict[Kind, str] = {"up": "up", "gate": "up", "down": "down", "q": "heads", "k": "heads", "v": "heads"}
_GATED: dict[str, Kind] = {"up": "up", "down": "down", "heads": "o"}


@dataclass(frozen=True)
class ProjectionRows:
    """The rows of one projection that train.

    Attributes:
        kind: Which projection.
        layer: Name of its linear layer.
        first: First row in that layer.
        size: Number of rows.
        block: Number of its transformer layer.
    """

    kind: Kind
    layer: str
    first: int
    size: int
    block: int

    @property
    def units(self) -> str:
        """What the rows belong to: ``up``, ``down`` or ``heads``."""
        return _UNITS[self.kind]


def find_rows(model: nn.Module, layers: str, kinds: Sequence[Kind], candidates: frozenset[str]) -> list[ProjectionRows]:
    """Returns the projections of some transformer layers, as far as they are candidates, in the order of the layers.

    Raises:
        ConfigError: ``layers`` is no range.
        TargetError: The model has no such layers, or not such projections in them.
    """
    blocks = _block_numbers(model, layers)
    found = []
    for kind in kinds:
        own = [
            ProjectionRows(kind, projection.layer, projection.first, projection.size, block)
            for block, projection in _by_block(model, kind, blocks).items()
            if f"{projection.layer}.weight" in candidates
        ]
        if not own:
            raise TargetError(
                f"the model has no {kind} projections there",
                where="method.modules",
                got=f"{type(model).__name__}, layers {layers}",
                want="a decoder whose attention and feed-forward parts are linear layers with the usual names",
            )
        found += own
    return sorted(found, key=lambda rows: rows.block)


def gates_of(model: Any, rows: Sequence[ProjectionRows], units: Sequence[str]) -> dict[tuple[int, str], Gate]:
    """Returns where the units that the rows belong to are gated, by transformer layer and kind of unit.

    Args:
        model: The model.
        rows: As :func:`find_rows` returns them.
        units: The kinds of units that are looked at.
    """
    wanted = {(own.block, own.units) for own in rows if own.units in units}
    gates = {}
    for unit, kind in _GATED.items():
        blocks = [block for block, own in wanted if own == unit]
        for block, projection in _by_block(model, kind, blocks).items():
            width = projection.size // model.config.get_text_config().num_attention_heads if unit == "heads" else 1
            gates[block, unit] = Gate(
                projection.layer, unit == "heads", projection.first, projection.size // width, width
            )
    return gates


def row_importance(model: Any, rows: ProjectionRows, importance: Mapping[tuple[int, str], Tensor]) -> Tensor:
    """Returns the importance of each row of a projection, float32 (size,): that of its unit, or zero without one.

    A key or value head has the mean importance of the query heads that read it.
    """
    own = importance.get((rows.block, rows.units))
    if own is None:
        return torch.zeros(rows.size)
    if rows.kind in ("k", "v"):
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        own = own.view(heads, -1).mean(1)
    return own.repeat_interleave(rows.size // own.numel())


def _block_numbers(model: nn.Module, layers: str) -> range:
    try:
        _, blocks = find_blocks(model)
    except LookupError as error:
        raise TargetError("the model has no transformer layers", where="method.layers", got=str(error)) from error
    return layer_range(layers, len(blocks), "method.layers")


def _by_block(model: nn.Module, kind: Kind, blocks: Sequence[int]) -> dict[int, Projection]:
    place, _ = find_blocks(model)
    prefixes = {f"{place}.{block}.": block for block in blocks}
    found = {}
    for projection in find_projections(model, kind):
        block = next((block for prefix, block in prefixes.items() if projection.layer.startswith(prefix)), None)
        if block is not None:
            rows = out_features(model.get_submodule(projection.layer))
            # Of down, the channels are columns; here it is its rows that matter.
            found[block] = replace(projection, size=rows) if kind == "down" else projection
    return found
