"""Where in a model the trained parameters are, read from their names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["TrainedLayer", "TrainedPlaces", "find_trained_places"]

_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.(.+)$")
_LINEARS = {
    "q": r"q_proj|query|q_lin",
    "k": r"k_proj|key|k_lin",
    "v": r"v_proj|value|v_lin",
    "qkv": r"c_attn|qkv_proj|query_key_value|Wqkv|att_proj",
    "gate": r"gate_proj|w1",
    "up": r"up_proj|gate_up_proj|c_fc|fc1|fc_in|dense_h_to_4h|w3",
    "down": r"down_proj|fc2|fc_out|dense_4h_to_h|w2|mlp\.c_proj",
    "o": r"o_proj|out_proj|attn\.c_proj|attention\.dense",
}
_PLACES = {place: re.compile(rf"(?:^|\.)(?:{names})(?:\.|$)") for place, names in _LINEARS.items()}
_NORM = re.compile(r"(?:^|\.)(?:\w*norm\w*|ln_\w+)(?:\.|$)", re.IGNORECASE)
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|embed_in|embedding|embeddings)(?:\.|$)")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)(?:\.|$)")


@dataclass
class TrainedLayer:
    """What trains in one linear layer.

    Attributes:
        rank: Width of what an adapter keeps besides its input, per token.
        columns: Input columns that train where only those do, else 0.
    """

    rank: int = 0
    columns: int = 0


@dataclass
class TrainedPlaces:
    """Where the trained parameters are.

    Attributes:
        count: Trained scalars.
        blocks: Block -> place (``q``, ``o``, ``down``, ``norm``, ... or ``other``) -> what trains there.
        embedding: Whether the input embedding trains.
        head: Whether the output head trains.
        final_norm: Whether the norm after the last block trains.
    """

    count: int = 0
    blocks: dict[int, dict[str, TrainedLayer]] = field(default_factory=dict)
    embedding: bool = False
    head: bool = False
    final_norm: bool = False

    @property
    def norms(self) -> bool:
        """Whether gradients reach the norm after the last block."""
        return self.embedding or self.final_norm or bool(self.blocks)


def find_trained_places(trained: Mapping[str, tuple[int, ...]]) -> TrainedPlaces:
    """Sorts trained parameters into the places of a decoder by their names.

    Args:
        trained: Name -> shape.
    """
    places = TrainedPlaces(count=sum(math.prod(shape) for shape in trained.values()))
    for name, shape in trained.items():
        match = _BLOCK.search(name)
        if match is None:
            places.embedding |= _EMBEDDING.search(name) is not None
            places.head |= _HEAD.search(name) is not None
            places.final_norm |= _NORM.search(name) is not None
            continue
        inside = match.group(2)
        place = next((place for place, names in _PLACES.items() if names.search(inside)), "")
        place = place or ("norm" if _NORM.search(inside) else "other")
        layer = places.blocks.setdefault(int(match.group(1)), {}).setdefault(place, TrainedLayer())
        _note(layer, inside, shape)
    return places


def _note(layer: TrainedLayer, inside: str, shape: tuple[int, ...]) -> None:
    if inside.endswith((".columns", ".slice_delta")):
        layer.columns += shape[-1]
    elif inside.endswith(".rows"):
        return  # as of a whole tensor, the layer's input is kept
    elif inside.endswith((".weight", ".bias")) and not re.search(r"lora|adapter|shira|oft|ia3", inside):
        return  # a tensor of the base itself
    elif len(shape) > 1:
        layer.rank = max(layer.rank, min(shape))
    elif shape:
        layer.rank = max(layer.rank, shape[0]) if layer.rank == 0 else layer.rank
