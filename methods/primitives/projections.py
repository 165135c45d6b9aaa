"""Where the blocks of a causal LM write to the residual stream: the last linears of attention and feed-forward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

__all__ = ["OutputProjections", "find_output_projections", "in_features"]

# The spellings that transformers' causal LMs use, as whole dotted segments at the end of a module's name.
_ATTENTION = (
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
)
_FEED_FORWARD = (
    "mlp.down_proj",
    "ffn.down_proj",
    "mlp.c_proj",
    "mlp.fc2",
    "mlp.fc_out",
    "mlp.dense_4h_to_h",
    "feed_forward.w2",
    "fc2",
)


@dataclass(frozen=True)
class OutputProjections:
    """Names of the output projections, in the order of the blocks."""

    attention: tuple[str, ...]
    feed_forward: tuple[str, ...]


def find_output_projections(model: nn.Module) -> OutputProjections:
    """Returns the names of the attention and feed-forward output projections of ``model``."""
    names = [name for name, module in model.named_modules() if hasattr(module, "weight")]
    return OutputProjections(
        attention=tuple(name for name in names if _ends_with(name, _ATTENTION)),
        feed_forward=tuple(name for name in names if _ends_with(name, _FEED_FORWARD)),
    )


def in_features(layer: nn.Module) -> int:
    """Returns the input width of a ``nn.Linear`` or a ``Conv1D`` (which stores its weight as in x out)."""
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    return weight.shape[0] if isinstance(layer, Conv1D) else weight.shape[1]


def _ends_with(name: str, endings: tuple[str, ...]) -> bool:
    return any(f".{name}".endswith(f".{ending}") for ending in endings)
