"""By chance: what every other scorer has to beat."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from finetune.data_selection.base import Evidence, RowScorer, Score, ScorerConfig
from finetune.data_selection.registry import register

if TYPE_CHECKING:
    from finetune.data_selection.pool import Example

__all__ = ["RandomConfig", "RandomScorer"]


class RandomConfig(ScorerConfig):
    """Which chance."""

    seed: int = Field(default=42, ge=0, description="Another seed chooses other rows.")


@register("random")
class RandomScorer(RowScorer):
    """Scores rows by chance, uniform in [0, 1): the baseline that a scorer has to beat.

    The number is a hash of the seed and the row's content, so a row scores the same wherever it stands in the file.
    """

    needs_answers: ClassVar[bool] = False
    Config: ClassVar[type[ScorerConfig]] = RandomConfig
    config: RandomConfig

    def models(self, default: str) -> list[str]:
        """Needs none."""
        return []

    def score(self, example: Example, *evidence: Evidence) -> Score:
        """Returns the row's number."""
        digest = hashlib.sha256(f"{self.config.seed} {example.key}".encode()).digest()
        return Score(int.from_bytes(digest[:6], "big") / 2**48)
