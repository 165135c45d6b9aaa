"""Messages to tokens and labels: the one function that training, evaluation, selection and chat use.

Text is rendered by the chat template and tokenised once, without special tokens added (a template has its own). What
carries loss is a range of characters, found by rendering the conversation up to each answer, and so a range of
positions: never a search for token ids, so an EOS that is also the padding token keeps its loss.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from finetune.core.errors import DataError
from finetune.data.records import Conversation, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["IGNORED", "Encoded", "LossOn", "prompt_text", "render", "render_all", "render_prompt"]

LossOn = Literal["assistant", "completion", "all", "last"]
IGNORED = -100
"""Label of a position without loss."""


@dataclass(frozen=True)
class Encoded:
    """One example.

    Attributes:
        input_ids: Token ids.
        labels: The same ids where they carry loss, -100 elsewhere.
        ends_with_eos: Whether each answer under the loss ends in a special token that carries loss.
    """

    input_ids: list[int]
    labels: list[int]
    ends_with_eos: bool = True


def render(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, *, loss_on: LossOn) -> Encoded:
    """Returns one conversation as tokens; see :func:`render_all`."""
    return render_all([conversation], tokenizer, loss_on=loss_on)[0]


def render_all(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, *, loss_on: LossOn
) -> list[Encoded]:
    """Returns conversations as tokens and labels.

    Args:
        conversations: Messages, or plain text (which carries loss throughout and gets the EOS token).
        tokenizer: A fast tokenizer with a chat template.
        loss_on: ``assistant``: every answer; ``completion`` and ``last``: the last answer; ``all``: everything.

    Raises:
        DataError: The template cannot render a conversation, or renders an earlier turn anew when a later one follows.
    """
    if not conversations:
        return []
    rendered = [_text_and_spans(conversation, tokenizer, loss_on) for conversation in conversations]
    batch = tokenizer([text for text, _ in rendered], add_special_tokens=False, return_offsets_mapping=True)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return [
        _label(ids, offsets, spans, special)
        for ids, offsets, (_, spans) in zip(batch["input_ids"], batch["offset_mapping"], rendered, strict=True)
    ]


def render_prompt(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens after which the model answers: the start of the training example, token for token."""
    ids: list[int] = tokenizer(prompt_text(messages, tokenizer), add_special_tokens=False)["input_ids"]
    return ids


def prompt_text(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the text after which the model answers; it has its special tokens, so none are added to it."""
    return _apply_template(messages, tokenizer, generation=True)


Span = tuple[int, int]


def _text_and_spans(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn
) -> tuple[str, list[Span]]:
    messages = conversation.messages
    if not messages:
        text = conversation.text + str(tokenizer.eos_token)
        return text, [(0, len(text))]
    whole = _apply_template(messages, tokenizer, tools=conversation.tools, where=conversation.where)
    if loss_on == "all":
        return whole, [(0, len(whole.rstrip()))]
    answers = [position for position, message in enumerate(messages) if message.role == "assistant"]
    if loss_on != "assistant":
        answers = answers[-1:]
    return whole, [_answer_span(conversation, tokenizer, whole, position) for position in answers]


def _answer_span(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, whole: str, position: int) -> Span:
    """Returns the characters of the answer at ``position``: from the generation prompt to its end of turn."""
    messages = conversation.messages
    apply = functools.partial(_apply_template, tools=conversation.tools, where=conversation.where)
    before = apply(messages[:position], tokenizer, generation=True)
    through = whole if position == len(messages) - 1 else apply(messages[: position + 1], tokenizer)
    # A newline after the end-of-turn token is the template's, not the answer's.
    through = through.rstrip()
    if not (whole.startswith(through) and through.startswith(before)):
        raise DataError(
            "the chat template does not render a conversation as the start of a longer one, so what the model is asked "
            "after training would differ from what it was trained on",
            where=conversation.where,
            got=repr(whole[:200]),
            fix="data.loss_on: last with single-turn data, or another data.chat_template",
        )
    return len(before), len(through)


def _apply_template(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    generation: bool = False,
    tools: Sequence[Any] = (),
    where: str = "",
) -> str:
    import jinja2

    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(
            tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=generation, tools=list(tools) or None
            )
        )
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise DataError(
            "the chat template cannot render the conversation",
            where=where,
            got=str(error),
            fix="another data.chat_template (finetune ls templates)",
        ) from error


def _label(ids: list[int], offsets: list[Span], spans: list[Span], special: set[int]) -> Encoded:
    labels = [IGNORED] * len(ids)
    ends_with_eos = True
    position = 0
    for start, end in spans:
        while position < len(ids) and offsets[position][0] < start:
            position += 1
        last = None
        while position < len(ids) and offsets[position][1] <= end:
            labels[position] = last = ids[position]
            position += 1
        ends_with_eos &= last in special
    return Encoded(ids, labels, ends_with_eos)
