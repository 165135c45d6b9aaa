"""Multiple choice: the option whose tokens are the likeliest, per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from finetune.evaluation.likelihood import LabelledRow, row_likelihoods

if TYPE_CHECKING:
    from torch import nn

__all__ = ["choose"]


def choose(
    model: nn.Module,
    questions: Sequence[Sequence[LabelledRow]],
    *,
    batch_size: int,
    progress: Callable[[int], object] | None = None,
) -> list[int]:
    """Returns, for each question, the position of the option with the highest mean log-likelihood per labelled token.

    The mean rather than the sum: a long option is not worse for being long. The end-of-turn token is one of the tokens.
    Of equal options the first wins.

    Args:
        model: A causal LM, plain or wrapped by PEFT.
        questions: For each question its options, each rendered as a whole answer with only the answer labelled.
        batch_size: Options of one forward pass.
        progress: Called with the number of options that were just finished.
    """
    options = [option for question in questions for option in question]
    likelihoods = iter(row_likelihoods(model, options, batch_size=batch_size, progress=progress))
    chosen = []
    for question in questions:
        scored = [next(likelihoods) for _ in question]
        means = [option.log_likelihood / max(1, option.tokens) for option in scored]
        chosen.append(means.index(max(means)))
    return chosen
