"""S2FT's plan: which columns and rows of which layers train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from finetune.core.errors import TargetError
from finetune.core.learned_state import INDEX, learned_names, read_learned_state
from finetune.methods.primitives.calibration import Batches
from finetune.methods.primitives.entry_scope import block_matrices
from finetune.methods.primitives.projections import Kind, Projection, find_projections, in_features
from finetune.methods.primitives.unit_selection import UnitScore, even_counts, rank_units, unit_scores
from finetune.methods.primitives.weight_slice import COLUMNS, ROWS, can_slice

__all__ = ["LayerPlan", "UnitChoice", "plan_units"]

Unit = Literal["attention head", "key-value head", "channel"]
_UNITS: dict[Kind, Unit] = {
    "o": "attention head",
    "down": "channel",
    "v": "key-value head",
    "up": "channel",
    "gate": "channel",
}
_KEYS: dict[Kind, str] = {
    "o": "o_ratio",
    "down": "down_ratio",
    "v": "v_ratio",
    "up": "up_ratio",
    "gate": "gate_ratio",
}


class UnitChoice(Protocol):
    """What the plan reads of S2FT's config."""

    ratio: float
    o_ratio: float | None
    down_ratio: float | None
    v_ratio: float
    up_ratio: float
    gate_ratio: float
    select: UnitScore
    pick: Literal["largest", "smallest"]
    exclude_adapters: list[str]
    seed: int


@dataclass
class LayerPlan:
    """What trains of one layer.

    Attributes:
        layer: Its name.
        axis: ``ROWS`` or ``COLUMNS``.
        unit: What the columns or rows belong to.
        index: The columns or rows, int64 ascending (K,).
    """

    layer: str
    axis: int
    unit: Unit
    index: Tensor


@dataclass(frozen=True)
class _Group:
    """The projections of one kind, the columns or rows of one unit in each, and the share of units that trains."""

    kind: Kind
    projections: list[Projection]
    width: int
    share: float

    @property
    def axis(self) -> int:
        return COLUMNS if self.kind in ("o", "down") else ROWS


def plan_units(
    model: nn.Module,
    candidates: frozenset[str],
    choice: UnitChoice,
    calibration: Batches | None,
    *,
    chosen_before: bool = False,
) -> list[LayerPlan]:
    """Chooses heads and channels, and returns what trains of each layer, layers that get nothing included.

    Args:
        model: The model, frozen, on its device or without weights.
        candidates: Parameters that may train.
        choice: What to choose.
        calibration: Batches for the scores that look at data; without them, or without weights, only how much is chosen
            of each layer is right: a learned state will say what was chosen.
        chosen_before: Whether a learned state will say what was chosen, so that the adapters to avoid are not looked
            at: they may be gone by now.

    Raises:
        TargetError: The model lacks projections that are asked for, or too few units are left to choose from.
    """
    generator = torch.Generator().manual_seed(choice.seed)
    groups = _groups(model, candidates, choice)
    scores = _scores(model, groups, choice, calibration)
    taken = _taken(model, [] if chosen_before else choice.exclude_adapters)
    plans: dict[str, LayerPlan] = {}
    for group in groups:
        sizes = [projection.size // group.width for projection in group.projections]
        counts = even_counts(sizes, group.share, generator)
        for projection, size, count in zip(group.projections, sizes, counts, strict=True):
            own = scores.get((group.kind, projection.layer))
            ranked = rank_units(own, size, pick=choice.pick, generator=generator)
            free = _without(ranked, taken.get((projection.layer, group.axis), set()), group.width, projection.first)
            if free.numel() < count:
                raise TargetError(
                    f"too few {_UNITS[group.kind]}s are left to choose from",
                    where=projection.layer,
                    got=f"{free.numel()} of {size} outside the adapters",
                    want=f"{count}",
                    fix=f"a smaller method.{_KEYS[group.kind]}, or fewer method.exclude_adapters",
                )
            index = projection.first + free[:count, None] * group.width + torch.arange(group.width)
            _add(plans, LayerPlan(projection.layer, group.axis, _UNITS[group.kind], index.reshape(-1).sort().values))
    return list(plans.values())


def _groups(model: nn.Module, candidates: frozenset[str], choice: UnitChoice) -> list[_Group]:
    found: dict[Kind, list[Projection]] = {
        kind: [p for p in find_projections(model, kind) if f"{p.layer}.weight" in candidates] for kind in _UNITS
    }
    config: Any = model.config
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    shares = _shares(model, candidates, choice, found)
    groups = []
    for kind, projections in found.items():
        if shares[kind] == 0:
            continue
        if not projections:
            _refuse(model, kind)
        width = {"o": projections[0].size // heads, "v": projections[0].size // key_heads}.get(kind, 1)
        groups.append(_Group(kind, projections, width, shares[kind]))
    return groups


def _shares(
    model: Any, candidates: frozenset[str], choice: UnitChoice, found: Mapping[Kind, list[Projection]]
) -> dict[Kind, float]:
    allowed = {name: parameter for name, parameter in model.named_parameters() if name in candidates}
    even = choice.ratio * sum(_size(model, name) for name in block_matrices(model, allowed)) / 2
    shares: dict[Kind, float] = {"v": choice.v_ratio, "up": choice.up_ratio, "gate": choice.gate_ratio}
    given: dict[Kind, float | None] = {"o": choice.o_ratio, "down": choice.down_ratio}
    for kind, ratio in given.items():
        size = sum(_size(model, f"{projection.layer}.weight") for projection in found[kind])
        by_ratio = min(1.0, even / size) if size else 1.0
        shares[kind] = by_ratio if ratio is None else ratio
    return {kind: shares[kind] for kind in _UNITS}


def _size(model: nn.Module, name: str) -> int:
    """Returns the number of entries of a matrix; a quantised layer's tensor has fewer elements than that."""
    layer = model.get_submodule(name.rpartition(".")[0])
    widths = (getattr(layer, "in_features", None), getattr(layer, "out_features", None))
    if name.endswith(".weight") and isinstance(widths[0], int) and isinstance(widths[1], int):
        return widths[0] * widths[1]
    return model.get_parameter(name).numel()


def _refuse(model: nn.Module, kind: Kind) -> None:
    linears = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if can_slice(module)})
    raise TargetError(
        f"s2ft finds no layer for {_KEYS[kind]} in {type(model).__name__}",
        want="one linear layer per block, of a name that transformers' causal LMs use",
        got=", ".join(linears),
        fix=f"method.{_KEYS[kind]}: 0 to train without it, or another method (finetune ls methods)",
    )


def _scores(
    model: nn.Module, groups: list[_Group], choice: UnitChoice, calibration: Batches | None
) -> dict[tuple[Kind, str], Tensor]:
    """Returns scores by kind and layer: a channel's are those of its columns of the block's down projection."""
    if choice.select == "random":
        return {}
    weightless = any(parameter.is_meta for parameter in model.parameters())
    if weightless or (choice.select != "weight" and not calibration):
        # Any units do until a learned state says which. They are not drawn: that would shift the draws of the counts,
        # which have to be those of the run that wrote the state.
        return {(g.kind, p.layer): torch.zeros(p.size // g.width) for g in groups for p in g.projections}
    sources = {(group.kind, p.layer): source for group in groups for p, source in _sources(model, group)}
    config: Any = model.config
    heads = int(config.get_text_config().num_attention_heads)
    widths = {
        source: in_features(model.get_submodule(source)) // heads if kind in ("o", "v") else 1
        for (kind, _), source in sources.items()
    }
    by_layer = unit_scores(model, widths, choice.select, calibration)
    scores = {}
    for group in groups:
        for projection in group.projections:
            key = (group.kind, projection.layer)
            # Query heads that share a key-value head stand together.
            size = projection.size // group.width
            scores[key] = by_layer[sources[key]].square().reshape(size, -1).sum(1).sqrt()
    return scores


def _sources(model: nn.Module, group: _Group) -> list[tuple[Projection, str]]:
    """Returns each projection of ``group`` with the layer beside it whose columns score its units."""
    kind: Kind = "o" if group.kind in ("o", "v") else "down"
    beside = {source.layer.rpartition(".")[0]: source.layer for source in find_projections(model, kind)}
    return [(projection, beside[projection.layer.rpartition(".")[0]]) for projection in group.projections]


def _taken(model: nn.Module, adapters: Iterable[str]) -> dict[tuple[str, int], set[int]]:
    """Returns by layer and axis of its weight as (out, in) the columns or rows that other learned states have."""
    taken: dict[tuple[str, int], set[int]] = {}
    for folder in adapters:
        tensors, metadata = read_learned_state(Path(folder))
        for name in learned_names(tensors):
            axis = metadata.get("axes", {}).get(name)
            if axis is None:
                raise TargetError(
                    "the adapter trained single entries or whole tensors, which no head or channel avoids",
                    where=f"method.exclude_adapters: {folder}",
                    got=name,
                    want="learned states of s2ft",
                )
            layer = name.removesuffix(".weight")
            turned = 1 - axis if isinstance(model.get_submodule(layer), Conv1D) else axis
            taken.setdefault((layer, turned), set()).update(tensors[f"{name}{INDEX}"].tolist())
    return taken


def _without(units: Tensor, taken: set[int], width: int, first: int) -> Tensor:
    """Returns ``units`` in their order without those that any of the columns or rows ``taken`` belongs to."""
    gone = {(place - first) // width for place in taken}
    return torch.tensor([unit for unit in units.tolist() if unit not in gone], dtype=torch.int64)


def _add(plans: dict[str, LayerPlan], plan: LayerPlan) -> None:
    """Adds a plan; gate and up projection may be rows of one fused layer."""
    if plan.layer not in plans:
        plans[plan.layer] = plan
    else:
        joined = torch.cat([plans[plan.layer].index, plan.index])
        plans[plan.layer].index = joined.sort().values
