"""The projections of a causal LM's blocks that belong to attention heads and to feed-forward channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers.pytorch_utils import Conv1D

__all__ = ["Kind", "Projection", "find_projections", "in_features", "out_features"]

Kind = Literal["o", "down", "q", "k", "v", "up", "gate"]
"""``o`` and ``down`` have a head's or channel's numbers in columns; the others in rows."""


def _attention_spellings(letter: str) -> tuple[str, ...]:
    places = ("self_attn", "attn", "attention", "attn.attention")
    return (*(f"{place}.{letter}_proj" for place in places), f"attention.w{letter}")


# The spellings that transformers' causal LMs use, as whole dotted segments at the end of a module's name.
_SPELLINGS: dict[Kind, tuple[str, ...]] = {
    "o": (
        "self_attn.o_proj",
        "attn.o_proj",
        "attention.o_proj",
        "self_attn.out_proj",
        "attn.out_proj",
        "attn.attention.out_proj",
        "attn.c_proj",
        "attention.dense",
        "self_attention.dense",
        "self_attn.dense",
        "attention.wo",
    ),
    "down": (
        "mlp.down_proj",
        "ffn.down_proj",
        "mlp.c_proj",
        "mlp.fc2",
        "mlp.fc_out",
        "mlp.dense_4h_to_h",
        "feed_forward.w2",
        "fc2",
    ),
    "q": _attention_spellings("q"),
    "k": _attention_spellings("k"),
    "v": _attention_spellings("v"),
    "up": (
        "mlp.up_proj",
        "ffn.up_proj",
        "mlp.c_fc",
        "mlp.fc1",
        "mlp.fc_in",
        "mlp.dense_h_to_4h",
        "feed_forward.w3",
        "fc1",
    ),
    "gate": ("mlp.gate_proj", "ffn.gate_proj", "feed_forward.w1"),
}
_GATE_AND_UP = ("mlp.gate_up_proj",)
"""Fused layers whose first half of the rows is the gate (Phi-3)."""
_QUERY_KEY_VALUE = ("self_attn.qkv_proj", "attn.c_attn")
"""Fused layers of queries, keys and values, in this order (Phi-3, GPT-2); others interleave them."""


@dataclass(frozen=True)
class Projection:
    """A linear layer, or a part of the rows of a fused one.

    Attributes:
        layer: Name of the layer.
        first: Its first row, where the projection is a part of the rows.
        size: Numbers of heads or channels that it has: columns of ``o`` and ``down``, rows of the others.
    """

    layer: str
    first: int
    size: int


def find_projections(model: nn.Module, kind: Kind) -> list[Projection]:
    """Returns the projections of one kind, in the order of the blocks; none where the model spells them otherwise."""
    named = {name: module for name, module in model.named_modules() if hasattr(module, "weight")}
    width = in_features if kind in ("o", "down") else out_features
    found = [Projection(name, 0, width(layer)) for name, layer in named.items() if _ends_with(name, _SPELLINGS[kind])]
    if found or kind in ("o", "down"):
        return found
    if kind in ("q", "k", "v"):
        config: Any = model.config
        text = config.get_text_config()
        if getattr(text, "multi_query", True) is False:
            return []  # GPT-BigCode interleaves them then
        return [
            _part_of_fused(name, kind, out_features(layer), text)
            for name, layer in named.items()
            if _ends_with(name, _QUERY_KEY_VALUE)
        ]
    halves = {name: out_features(layer) // 2 for name, layer in named.items() if _ends_with(name, _GATE_AND_UP)}
    return [Projection(name, half if kind == "up" else 0, half) for name, half in halves.items()]


def in_features(layer: nn.Module) -> int:
    """Returns the input width of a linear layer of any class (``Conv1D`` stores its weight as in x out)."""
    return _width(layer, "in_features", 0)


def out_features(layer: nn.Module) -> int:
    """Returns the output width of a linear layer of any class."""
    return _width(layer, "out_features", 1)


def _width(layer: Any, attribute: str, conv1d_axis: int) -> int:
    if isinstance(layer, Conv1D):
        return int(layer.weight.shape[conv1d_axis])
    # A quantised layer knows its widths, its weight does not show them.
    return int(getattr(layer, attribute, layer.weight.shape[1 - conv1d_axis] if layer.weight.ndim > 1 else 0))


def _part_of_fused(name: str, kind: Kind, rows: int, config: Any) -> Projection:
    heads = int(config.num_attention_heads)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    size = rows * key_heads // (heads + 2 * key_heads)
    places = {"q": (0, rows - 2 * size), "k": (rows - 2 * size, size), "v": (rows - size, size)}
    return Projection(name, *places[kind])


def _ends_with(name: str, endings: tuple[str, ...]) -> bool:
    return any(f".{name}".endswith(f".{ending}") for ending in endings)
