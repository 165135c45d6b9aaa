"""Reversed IFD: how little the answer helps to guess the instruction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from finetune.data.records import Message
from finetune.data_selection.base import Direction, Evidence, Measured, RowScorer, Score, ScorerConfig
from finetune.data_selection.registry import register
from finetune.data_selection.scorers.ifd import IfdConfig, ratio

if TYPE_CHECKING:
    from finetune.data_selection.engine.rater import Rater
    from finetune.data_selection.engine.targets import Pair
    from finetune.data_selection.pool import Example

__all__ = ["GUESS", "ReversedIfd"]

GUESS = "Here is an answer:\n\n{answer}\n\nWrite the instruction that it answers."
"""What the model is asked before it sees the instruction."""


@register("r_ifd")
class ReversedIfd(RowScorer):
    """Scores rows by reversed IFD: ``PPL(instruction | a request to guess it from the answer) / PPL(instruction)``.

    A low score means that the answer says which instruction it answers, so the lowest are kept; rows at 1 or above are
    not. Of a conversation with several turns every question is guessed from its answer. A row whose answer follows no
    instruction has no score.

    References:
        Li et al., "Selective Reflection-Tuning", arXiv 2402.10110, section 3.2.
    """

    paper: ClassVar[str] = "arXiv 2402.10110"
    direction: ClassVar[Direction] = "lowest"
    Config: ClassVar[type[ScorerConfig]] = IfdConfig
    unmeasured: ClassVar[frozenset[str]] = frozenset({"metric", "misaligned"})
    config: IfdConfig

    def measure(self, rater: Rater, batch: Sequence[Example]) -> list[Measured]:
        """Returns ``loss`` of the instruction given the answer, ``loss_alone`` and the number of ``scored_tokens``."""
        from finetune.data_selection.engine.targets import measure_pairs

        return measure_pairs(rater, [self.pair(rater, example) for example in batch])

    def pair(self, rater: Rater, example: Example) -> Pair:
        """Returns the instructions' tokens after a request to guess them, and alone.

        Raises:
            UnscorableError: There is no instruction.
        """
        from finetune.data.render import render_prompt
        from finetune.data_selection.engine.failures import UnscorableError
        from finetune.data_selection.engine.targets import Pair, spoken_pair

        pairs = []
        for exchange in example.exchanges:
            if exchange.instruction.strip():
                asked = render_prompt([Message("user", GUESS.format(answer=exchange.answer))], rater.tokenizer)
                target = rater.tokenizer(exchange.instruction, add_special_tokens=False)["input_ids"]
                pairs.append(spoken_pair(asked, target, rater.start, rater.context))
        if not pairs:
            raise UnscorableError("there is no instruction to guess")
        return Pair([row for pair in pairs for row in pair.given], [row for pair in pairs for row in pair.alone])

    def score(self, example: Example, *evidence: Evidence) -> Score:
        """Returns the ratio."""
        value = ratio(evidence[0], self.config.metric)
        excluded = value >= 1 and self.config.misaligned == "exclude"
        return Score(value, "the answer does not help to guess the instruction" if excluded else "")
