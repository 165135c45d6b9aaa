"""IFD by a small model, for a large one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from finetune.data_selection.base import ScorerConfig
from finetune.data_selection.registry import register
from finetune.data_selection.scorers.ifd import Ifd, IfdConfig

if TYPE_CHECKING:
    from finetune.data_selection.engine.rater import Rater
    from finetune.data_selection.engine.targets import Pair
    from finetune.data_selection.pool import Example

__all__ = ["Superfiltering", "SuperfilteringConfig"]


class SuperfilteringConfig(IfdConfig):
    """Which small model."""

    model: str = Field(
        default="openai-community/gpt2",
        min_length=1,
        description="The small model: hub id, folder, GGUF file or bundled model; it needs no chat template.",
    )


@register("superfiltering")
class Superfiltering(Ifd):
    """Scores rows by the IFD of a small model, which ranks much like that of a large one at a twentieth of the cost.

    The prompt is bare, ``instruction``, a newline, the answer, since a small base model knows no chat template; an
    answer that does not fit into the small model's context is cut at its end, on both sides alike.

    References:
        Li et al., "Superfiltering", arXiv 2402.00530, section 3.
    """

    paper: ClassVar[str] = "arXiv 2402.00530"
    Config: ClassVar[type[ScorerConfig]] = SuperfilteringConfig
    config: SuperfilteringConfig

    def models(self, default: str) -> list[str]:
        """Returns the small model."""
        return [self.config.model]

    def pair(self, rater: Rater, example: Example) -> Pair:
        """Returns the answers' tokens after the bare text before them, and alone."""
        from finetune.data_selection.engine.targets import Pair, spoken_pair

        pairs, before = [], ""
        for exchange in example.exchanges:
            before += f"{exchange.instruction}\n"
            context = rater.tokenizer(before, add_special_tokens=False)["input_ids"]
            target = rater.tokenizer(exchange.answer, add_special_tokens=False)["input_ids"]
            pairs.append(spoken_pair([*rater.start, *context], target, rater.start, rater.context))
            before += f"{exchange.answer}\n"
        return Pair([row for pair in pairs for row in pair.given], [row for pair in pairs for row in pair.alone])
