"""By likeness to a target: representation-based selection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from finetune.data_selection.base import FILE, Evidence, Measured, Score, Scorer, ScorerConfig
from finetune.data_selection.registry import register
from finetune.data_selection.scorers.k_center import scores_of_order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data_selection.engine.rater import Rater
    from finetune.data_selection.pool import Example

__all__ = ["RdsPlus", "RdsPlusConfig"]

_AT_A_TIME = 16


class RdsPlusConfig(ScorerConfig):
    """What the rows are to be like."""

    target: str = Field(
        default="",
        description="File with rows of the target task, of any form that data takes.",
        json_schema_extra=FILE,
    )
    target_rows: int = Field(default=200, ge=1, description="Rows of it that are used, the first ones.")


@register("rds_plus")
class RdsPlus(Scorer):
    """Ranks rows by likeness to a target task: its rows, in turn, take the most similar row that is left.

    Likeness is the cosine between position-weighted means of final hidden states. The score is one minus the share of
    the rows that rank before.

    References:
        Ivison et al., "Large-Scale Data Selection for Instruction Tuning", arXiv 2503.01807, section 3.
    """

    paper: ClassVar[str] = "arXiv 2503.01807"
    needs_answers: ClassVar[bool] = False
    unlisted: ClassVar[frozenset[str]] = frozenset({"similarity"})
    Config: ClassVar[type[ScorerConfig]] = RdsPlusConfig
    config: RdsPlusConfig

    def check(self, pool: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> None:
        """Sees that there is a target.

        Raises:
            ConfigError: None is named, or there is no such file.
            DataError: Its rows cannot be read.
        """
        from finetune.data_selection.target import check_targets

        super().check(pool, tokenizer)
        check_targets([self.config.target], self.config.target_rows, tokenizer, scorer=self.name)

    def begin(self, rater: Rater, pool: Sequence[Example]) -> None:
        """Embeds the target."""
        import numpy as np

        from finetune.data_selection.engine.embeddings import embed
        from finetune.data_selection.target import read_target

        target = read_target(self.config.target, self.config.target_rows, rater.tokenizer)
        rows = [example.encoded.input_ids for example in target]
        parts = [rows[start : start + _AT_A_TIME] for start in range(0, len(rows), _AT_A_TIME)]
        self._target_QD = np.stack([vector for part in parts for vector in embed(rater, part)])

    def measure(self, rater: Rater, batch: Sequence[Example]) -> list[Measured]:
        """Returns ``similarity``: the cosine to each row of the target; and the largest of them, ``nearest``."""
        from finetune.data_selection.engine.embeddings import embed, packed

        vectors = embed(rater, [example.encoded.input_ids for example in batch])
        similarities = [self._target_QD @ vector for vector in vectors]
        return [{"similarity": packed(found), "nearest": float(found.max())} for found in similarities]

    def score_pool(self, pool: Sequence[Example], evidence: Sequence[Sequence[Evidence]]) -> list[Score]:
        """Returns scores that fall with the rank; rows of equal likeness go by their content keys."""
        from finetune.data_selection.choice.diversity import round_robin
        from finetune.data_selection.engine.embeddings import unpacked

        by_key = sorted(range(len(pool)), key=lambda position: pool[position].key)
        order = round_robin(unpacked([evidence[position][0]["similarity"] for position in by_key]))
        return scores_of_order([by_key[place] for place in order])

    def fingerprint(self) -> dict[str, Any]:
        """Returns the config, with the target's content in place of its name."""
        from finetune.data_selection.target import hash_target

        return {**super().fingerprint(), "target": hash_target(self.config.target)}
