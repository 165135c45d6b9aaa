"""From sources to a tokenised data set, with every row that is left out counted by reason."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from finetune.core.errors import DataError, list_choices
from finetune.core.files import cache_folder, replaced_folder
from finetune.data.choices import choices_problem, other_answers
from finetune.data.inspect import mark_loss
from finetune.data.load import load_conversations
from finetune.data.packing import pack
from finetune.data.records import Conversation, DataSource, Dropped
from finetune.data.render import IGNORED, Encoded, LossOn, render_all, render_prompt
from finetune.data.task_template import TaskTemplate

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

__all__ = ["PreparedData", "Truncation", "check_dropped", "fit_length", "prepare_dataset", "split_eval"]

Truncation = Literal["drop", "left", "right"]
OTHER_ANSWERS = ("other_input_ids", "other_labels")
_BATCH = 1000
_REPORTED = 20
_PROMPTS_CHECKED = 32
_FORM = 1
"""Raised when what is cached changes its form."""


@dataclass(frozen=True)
class PreparedData:
    """Tokenised examples.

    Attributes:
        dataset: Columns ``input_ids``, ``labels``, ``length`` (tokens), ``documents`` (lengths) where packed, and
            ``task``, ``other_input_ids`` and ``other_labels`` (of a question's other answers) where asked for.
        dropped: Rows that are not used.
        examples: Examples, before packing.
        fingerprint: 16 hexadecimal digits over content, template, tokenizer and options.
        tokenizer: Which made the tokens.
        eos_share: Share of the examples whose answers end in a special token that carries loss, in [0, 1].
    """

    dataset: datasets.Dataset
    dropped: tuple[Dropped, ...]
    examples: int
    fingerprint: str
    tokenizer: PreTrainedTokenizerBase
    eos_share: float

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the rows' tasks, in alphabetical order, where asked for."""
        return tuple(sorted(self.dataset.unique("task"))) if "task" in self.dataset.column_names else ()

    @property
    def tokens(self) -> int:
        """All tokens."""
        return int(sum(self.dataset["length"]))

    @property
    def label_tokens(self) -> int:
        """Tokens that carry loss."""
        return sum(label != IGNORED for labels in self.dataset["labels"] for label in labels)

    @property
    def longest_labels(self) -> int:
        """Most tokens of one row that carry loss."""
        return max(sum(int(label != IGNORED) for label in labels) for labels in self.dataset["labels"])

    def example(self, position: int) -> str:
        """Returns the text of an example with what carries loss in square brackets."""
        row = self.dataset[position]
        return mark_loss(row["input_ids"], row["labels"], self.tokenizer)


def prepare_dataset(
    sources: Sequence[DataSource],
    tokenizer: PreTrainedTokenizerBase,
    *,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    system: str | None = None,
    loss_on: LossOn = "assistant",
    max_length: int = 1024,
    truncation: Truncation = "drop",
    packing: bool = False,
    on_error: Literal["fail", "skip"] = "fail",
    max_dropped: float = 0.1,
    seed: int = 42,
    vocabulary_size: int | None = None,
    cache: bool = True,
    limit: int | None = None,
    tasks: bool = False,
    template: TaskTemplate | None = None,
    choices: bool = False,
) -> PreparedData:
    """Reads, renders, tokenises, truncates and packs.

    Args:
        sources: Where the rows come from.
        tokenizer: A fast tokenizer with a chat template.
        format: Form of the rows; ``auto`` goes by their columns.
        columns: Our column name -> the data's.
        system: System message of conversations that have none.
        loss_on: Which tokens are learned.
        max_length: Longest example, in tokens.
        truncation: What happens to longer ones: ``drop``, or cut ``left`` (the prompt, before the answer is touched) or
            ``right``.
        packing: Whether several examples share a row.
        on_error: Whether an unusable row ends the run.
        max_dropped: Largest share of the rows that may be left out, in [0, 1].
        seed: Seed of the mixture.
        vocabulary_size: Rows of the model's embedding; no token may lie beyond.
        cache: Whether the result is kept in the user's cache folder.
        limit: Uses at most so many rows.
        tasks: Whether each example keeps its task; not with ``packing``, which puts several into a row.
        template: Puts rows of a labelled data set into words.
        choices: Whether each example comes with its question's other answers; not with ``packing``.

    Raises:
        DataError: Data, template or masks are unusable (P8, P10, P11).
    """
    conversations, unusable = load_conversations(
        sources, format=format, columns=columns, system=system, template=template, on_error=on_error, seed=seed
    )
    if tasks:
        _check_tasks(conversations, sources)
    conversations = conversations[:limit]
    if choices and (problems := [found for row in conversations if (found := choices_problem(row))]):
        raise DataError.of(problems[:_REPORTED])
    options: dict[str, Any] = {
        "loss_on": loss_on,
        "max_length": max_length,
        "truncation": truncation,
        "packing": packing,
    }
    if tasks:
        options["tasks"] = [row.task for row in conversations]
    if choices:
        options["choices"] = [row.extra["choices"] for row in conversations]
    fingerprint = _fingerprint(conversations, tokenizer, options)
    folder = cache_folder() / "data" / fingerprint
    stored = _read_cache(folder) if cache else None
    if stored is None:
        _check_prompts(conversations[:_PROMPTS_CHECKED], tokenizer)
        stored = _tokenise(conversations, tokenizer, loss_on, max_length, truncation, tasks=tasks, choices=choices)
        if cache:
            _write_cache(folder, stored)
    dataset, dropped, eos_share = stored
    _check(dataset, dropped, unusable, max_dropped, tokenizer, vocabulary_size)
    prepared = PreparedData(dataset, (*unusable, *dropped), len(dataset), fingerprint, tokenizer, eos_share)
    return _packed(prepared, max_length) if packing else prepared


def split_eval(prepared: PreparedData, held_out: float | int, *, seed: int) -> tuple[PreparedData, PreparedData]:
    """Returns training and held-out data; a float in (0, 1) is a share of the rows, an int a number of rows.

    Raises:
        DataError: Nothing would be left to train on.
    """
    total = len(prepared.dataset)
    count = max(1, round(held_out * total)) if isinstance(held_out, float) else held_out
    if count >= total:
        raise DataError("holding out leaves nothing to train on", where="data.eval", got=f"{count} of {total} rows")
    parts = prepared.dataset.train_test_split(test_size=count, seed=seed)
    train, evaluation = (
        replace(prepared, dataset=part, examples=len(part), fingerprint=f"{prepared.fingerprint}-{name}-{count}-{seed}")
        for name, part in parts.items()
    )
    return train, evaluation


def _check_tasks(conversations: Sequence[Conversation], sources: Sequence[DataSource]) -> None:
    """Refuses files of the same name whose rows would pass for one task, because nobody has named theirs."""
    unnamed = {source.path for source in sources if source.task is None}
    files: dict[str, set[str]] = {}
    for row in conversations:
        if row.source in unnamed and not row.own_task:
            files.setdefault(row.task, set()).add(row.source)
    for task, paths in files.items():
        if len(paths) > 1:
            raise DataError(
                f"several sources would be the one task {task!r}, after the file's name",
                where="data.train",
                got=list_choices(sorted(paths)),
                fix="task: NAME in each source, the same name where they are one task",
            )


Stored = tuple["datasets.Dataset", list[Dropped], float]


def _tokenise(
    conversations: list[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    loss_on: LossOn,
    max_length: int,
    truncation: Truncation,
    *,
    tasks: bool,
    choices: bool,
) -> Stored:
    import datasets
    from rich.console import Console
    from rich.progress import track

    kept = ["input_ids", "labels", "length", *(["task"] if tasks else []), *(OTHER_ANSWERS if choices else [])]
    columns: dict[str, list[Any]] = {name: [] for name in kept}
    dropped: list[Dropped] = []
    ended = 0
    starts = range(0, len(conversations), _BATCH)
    for start in track(starts, "tokenise", console=Console(stderr=True), disable=len(starts) < 3, transient=True):
        batch = conversations[start : start + _BATCH]
        for row, encoded in zip(batch, render_all(batch, tokenizer, loss_on=loss_on), strict=True):
            fitted, reason = fit_length(encoded, max_length, truncation)
            others = render_all(other_answers(row), tokenizer, loss_on="last") if choices else []
            fits = [fit_length(other, max_length, truncation) for other in others]
            reason = reason or next((why for _, why in fits if why), "")
            if reason:
                detail = f"{len(encoded.input_ids)} tokens"
                dropped.append(Dropped(row.source, row.line, row.id, reason, detail))
            else:
                columns["input_ids"].append(fitted.input_ids)
                columns["labels"].append(fitted.labels)
                columns["length"].append(len(fitted.input_ids))
                if tasks:
                    columns["task"].append(row.task)
                if choices:
                    columns["other_input_ids"].append([other.input_ids for other, _ in fits])
                    columns["other_labels"].append([other.labels for other, _ in fits])
                ended += fitted.ends_with_eos
    # Schema is given so that a data set without rows has it too.
    tokens = datasets.List(datasets.Value("int32"))
    kinds = {"input_ids": tokens, "labels": tokens, "length": datasets.Value("int32"), "task": datasets.Value("string")}
    kinds |= dict.fromkeys(OTHER_ANSWERS, datasets.List(tokens))
    features = datasets.Features({name: kinds[name] for name in columns})
    dataset = datasets.Dataset.from_dict(columns, features=features)
    return dataset, dropped, ended / max(1, len(dataset))


def fit_length(encoded: Encoded, max_length: int, truncation: Truncation) -> tuple[Encoded, str]:
    """Returns the example cut to ``max_length``, and why it is dropped instead, if it is."""
    over = len(encoded.input_ids) - max_length
    if over > 0:
        if truncation == "drop":
            return encoded, "longer than data.max_length"
        if truncation == "right":
            kept = slice(0, max_length)
            encoded = Encoded(encoded.input_ids[kept], encoded.labels[kept], ends_with_eos=False)
        else:
            prompt = next((i for i, label in enumerate(encoded.labels) if label != IGNORED), len(encoded.labels))
            # The answer is cut at its end, and only where it is longer than the limit by itself.
            kept = slice(min(over, prompt), min(over, prompt) + max_length)
            ends = encoded.ends_with_eos and over <= prompt
            encoded = Encoded(encoded.input_ids[kept], encoded.labels[kept], ends)
    # The first position has nothing before it that could predict it.
    if all(label == IGNORED for label in encoded.labels[1:]):
        return encoded, "no token carries loss"
    return encoded, ""


def _packed(prepared: PreparedData, max_length: int) -> PreparedData:
    import datasets

    dataset = prepared.dataset
    rows = pack(dataset["length"], max_length)
    ids, labels, lengths = dataset["input_ids"][:], dataset["labels"][:], dataset["length"][:]
    for row in labels:
        # Its first token must not be predicted from the last token of the document before.
        row[0] = IGNORED
    packed = datasets.Dataset.from_dict(
        {
            "input_ids": [[token for position in row for token in ids[position]] for row in rows],
            "labels": [[label for position in row for label in labels[position]] for row in rows],
            "length": [sum(lengths[position] for position in row) for row in rows],
            "documents": [[lengths[position] for position in row] for row in rows],
        }
    )
    return replace(prepared, dataset=packed)


def _check_prompts(conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase) -> None:
    """P10: what the model is asked is, token for token, the start of what it was trained on; one BOS at most."""
    for conversation in conversations:
        answers = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
        if not answers or conversation.tools:
            continue
        turn = replace(conversation, messages=conversation.messages[: answers[0] + 1])
        encoded = render_all([turn], tokenizer, loss_on="last")[0]
        prompt = render_prompt(turn.messages[:-1], tokenizer)
        if encoded.input_ids[: len(prompt)] != prompt:
            raise DataError(
                "the prompt is tokenised in another way when an answer follows",
                where=conversation.where,
                got=repr(tokenizer.decode(encoded.input_ids)[:200]),
                fix="a data.chat_template that ends the prompt in a special token or a newline",
            )
        if len(prompt) > 1 and prompt[0] == prompt[1] == tokenizer.bos_token_id and prompt[0] is not None:
            raise DataError("the chat template begins with two BOS tokens", where="data.chat_template")


def _check(
    dataset: datasets.Dataset,
    dropped: Sequence[Dropped],
    unusable: Sequence[Dropped],
    max_dropped: float,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary_size: int | None,
) -> None:
    check_dropped(len(dataset), [*unusable, *dropped], max_dropped)
    if vocabulary_size is not None:
        _check_vocabulary(dataset, tokenizer, vocabulary_size)


def check_dropped(kept: int, gone: Sequence[Dropped], max_dropped: float) -> None:
    """P11: most of the rows are used.

    Args:
        kept: Rows that are used.
        gone: Those that are not.
        max_dropped: Largest share of all that may be left out, in [0, 1].

    Raises:
        DataError: More than that is left out, or no row is used.
    """
    total = kept + len(gone)
    if gone and (len(gone) / total > max_dropped or not kept):
        reasons = Counter(row.reason for row in gone)
        examples = "; ".join(f"{row.source}:{row.line or row.id} {row.detail}" for row in gone[:3])
        raise DataError(
            f"{len(gone)} of {total} rows cannot be used" if kept else "no row is left to train on",
            where="data",
            got=", ".join(f"{count} {reason}" for reason, count in reasons.most_common()) + f" (first: {examples})",
            want=f"at most {max_dropped:.0%} dropped",
            fix="a larger data.max_length, data.truncation: left, or a higher data.max_dropped",
        )


def _check_vocabulary(dataset: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    """P8: no token beyond the rows of the embedding."""
    highest = max(max(ids) for ids in dataset["input_ids"])
    if highest < size:
        return
    row = next(i for i, ids in enumerate(dataset["input_ids"]) if max(ids) == highest)
    raise DataError(
        "the data holds a token that the model has no embedding for",
        where=f"example {row}",
        got=f"token {highest} ({tokenizer.convert_ids_to_tokens(highest)!r}), the model has {size}",
        fix="the tokenizer that belongs to the model",
    )


def _fingerprint(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> str:
    digest = hashlib.sha256(json.dumps([_FORM, options, tokenizer.chat_template], sort_keys=True).encode())
    backend: Any = tokenizer.backend_tokenizer
    digest.update(backend.to_str().encode())
    for row in conversations:
        turns = [[message.role, message.content] for message in row.messages]
        digest.update(json.dumps([turns, row.text, row.tools], ensure_ascii=False, default=str).encode())
    return digest.hexdigest()[:16]


def _read_cache(folder: Path) -> Stored | None:
    import datasets

    if not folder.is_dir():
        return None
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    os.utime(folder)
    dataset = datasets.load_from_disk(str(folder / "rows"))
    assert isinstance(dataset, datasets.Dataset)
    return dataset, [Dropped(**row) for row in about["dropped"]], about["eos_share"]


def _write_cache(folder: Path, stored: Stored) -> None:
    dataset, dropped, eos_share = stored
    about = {"dropped": [vars(row) for row in dropped], "eos_share": eos_share}
    try:
        with replaced_folder(folder) as beside:
            dataset.save_to_disk(str(beside / "rows"))
            (beside / "about.json").write_text(json.dumps(about, default=str), encoding="utf-8")
    except OSError:
        # Another process of the run has written the same in the same moment.
        if not (folder / "about.json").is_file():
            raise
