"""By influence on a target task: does a training step on the row lower the loss there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from finetune.data_selection.base import (
    FILE,
    Evidence,
    Load,
    Measured,
    Measurer,
    RowScorer,
    Score,
    ScorerConfig,
)
from finetune.data_selection.registry import register

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from finetune.data_selection.engine.influence import CountSketch, WarmUp
    from finetune.data_selection.pool import Example

__all__ = ["Less", "LessConfig"]


class LessConfig(ScorerConfig):
    """What the rows are to help with, and the LoRA whose gradients tell."""

    target: list[str] = Field(
        default=[], description="Files with rows of the target task, one per subtask.", json_schema_extra=FILE
    )
    target_rows: int = Field(default=200, ge=1, description="Rows of each that are used, the first ones.")
    warmup_fraction: float = Field(default=0.05, gt=0, le=1, description="Share of the rows that the LoRA trains on.")
    warmup_epochs: int = Field(default=4, ge=1, description="Epochs of that; gradients are taken after each.")
    warmup_batch: int = Field(default=32, ge=1, description="Rows of an optimizer step of it.")
    learning_rate: float = Field(default=2e-5, gt=0, description="Its learning rate, which falls linearly to zero.")
    r: int = Field(default=128, ge=1, description="Rank of the LoRA.")
    lora_alpha: int = Field(default=512, ge=1, description="Scale of its update times r.")
    projection: int = Field(default=8192, ge=1, description="Numbers that a gradient is projected to.")
    seed: int = Field(default=0, ge=0, description="Of the sample, the LoRA and the projection.")


@register("less")
class Less(RowScorer):
    """Scores rows by influence: how well the step that Adam takes on a row agrees with gradients of a target task.

    A LoRA trains on a sample of the rows; after each epoch the Adam direction of every row and the gradients of the
    target's rows are randomly projected, and their cosines, averaged over a subtask, are summed with the epochs' mean
    learning rates as weights. The score is the largest over the subtasks. Cosines do not favour short rows, whose
    gradients are large. The projection is a count sketch, which costs as much as reading the gradient. Each process,
    and each that goes on with a scoring, trains the LoRA for itself, in the same way.

    References:
        Xia et al., "LESS", arXiv 2402.04333, sections 3 and 4.
    """

    paper: ClassVar[str] = "arXiv 2402.04333"
    needs_answers: ClassVar[bool] = False
    Config: ClassVar[type[ScorerConfig]] = LessConfig
    config: LessConfig
    _warm_up: WarmUp | None = None

    def models(self, default: str) -> list[str]:
        """Returns the model once per epoch: each is measured with by itself."""
        return [default] * self.config.warmup_epochs

    def check(self, pool: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> None:
        """Sees that there is a target.

        Raises:
            ConfigError: None is named, or there is no such file.
            DataError: Its rows cannot be read.
        """
        from finetune.data_selection.target import check_targets

        super().check(pool, tokenizer)
        check_targets(self.config.target, self.config.target_rows, tokenizer, scorer=self.name)

    def measurer(self, number: int, name: str, load: Load, pool: Sequence[Example]) -> Measurer:
        """Returns what measures after epoch ``number``, counted from 0; the LoRA is trained up to there."""
        import torch

        from finetune.data_selection.engine.influence import CountSketch, WarmUp
        from finetune.data_selection.target import read_target

        config = self.config
        warm_up = self._warm_up
        if warm_up is None:
            rater = load(name)
            self._tokenizer = rater.tokenizer
            by_key = sorted(pool, key=lambda example: example.key)
            sample = random.Random(config.seed).sample(by_key, max(1, round(config.warmup_fraction * len(pool))))
            warm_up = WarmUp(
                rater,
                sample,
                epochs=config.warmup_epochs,
                r=config.r,
                lora_alpha=config.lora_alpha,
                learning_rate=config.learning_rate,
                batch_rows=config.warmup_batch,
                seed=config.seed,
            )
            self._sketch = CountSketch(warm_up.size, config.projection, config.seed, rater.device)
        while warm_up.epoch <= number:
            warm_up.train_epoch()
        # The last one is not gone on with, and its memory is wanted elsewhere.
        self._warm_up = warm_up if number + 1 < config.warmup_epochs else None
        targets = [read_target(path, config.target_rows, self._tokenizer) for path in config.target]
        means = [torch.stack([_unit(self._sketch(warm_up.gradient(row))) for row in rows]).mean(0) for rows in targets]
        sketch, target_SK, moments = self._sketch, torch.stack(means), warm_up.moments()
        return lambda batch: [_influence(warm_up, sketch, moments, target_SK, row) for row in batch]

    def score(self, example: Example, *evidence: Evidence) -> Score:
        """Returns the largest influence on a subtask, summed over epochs with their learning rates' shares."""
        rates = [found["learning_rate"] for found in evidence]
        by_subtask = zip(*(found["influence"] for found in evidence), strict=True)
        sums = [sum(rate * one for rate, one in zip(rates, ones, strict=True)) for ones in by_subtask]
        return Score(max(sums) / sum(rates))

    def fingerprint(self) -> dict[str, Any]:
        """Returns the config, with the targets' content in place of their names."""
        from finetune.data_selection.target import hash_target

        return {**super().fingerprint(), "target": [hash_target(path) for path in self.config.target]}


def _influence(
    warm_up: WarmUp, sketch: CountSketch, moments: tuple[Tensor, Tensor], target_SK: Tensor, row: Example
) -> Measured:
    """Returns the mean cosine to the rows of each subtask (S of them), and the epoch's learning rate."""
    from finetune.data_selection.engine.influence import adam_direction

    direction = adam_direction(warm_up.gradient(row), *moments, betas=warm_up.betas, eps=warm_up.eps)
    influence_S = target_SK @ _unit(sketch(direction))
    return {"influence": influence_S.tolist(), "learning_rate": warm_up.mean_learning_rate}


def _unit(vector_K: Tensor) -> Tensor:
    unit_K: Tensor = vector_K / vector_K.norm()
    return unit_K
