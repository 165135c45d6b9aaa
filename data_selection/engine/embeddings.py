"""A row as one vector: the mean of its final hidden states, later tokens counting more, at unit length.

Legend: T tokens of a row, D model width.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from finetune.data_selection.engine.rater import Rater

__all__ = ["Vector", "embed", "packed", "position_weighted_mean", "unpacked"]

Vector = NDArray[np.float32]


def embed(rater: Rater, rows: Sequence[Sequence[int]]) -> list[Vector]:
    """Returns the vector of each row of token ids, (D,) float32."""
    return [position_weighted_mean(hidden_TD) for hidden_TD in rater.hidden_states(rows)]


def position_weighted_mean(hidden_TD: Tensor) -> Vector:
    """Returns the mean with weights ``t / (1 + ... + T)``, t counted from 1, divided by its length."""
    import torch

    weights_T = torch.arange(1, len(hidden_TD) + 1, dtype=torch.float32, device=hidden_TD.device)
    mean_D = (weights_T / weights_T.sum()) @ hidden_TD.float()
    found: Vector = (mean_D / mean_D.norm()).cpu().numpy()
    return found


def packed(vector: Vector) -> str:
    """Returns a vector as text that :func:`unpacked` reads back exactly."""
    return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode()


def unpacked(texts: Sequence[str]) -> NDArray[np.float32]:
    """Returns vectors as the rows of a matrix."""
    return np.stack([np.frombuffer(base64.b64decode(text), dtype="<f4") for text in texts])
