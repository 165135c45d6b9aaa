"""What a recipe may say: one frozen model per section, every key with its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from finetune.data.task_template import NamedTemplate
from finetune.data_selection.chat.config import ChatConfig

__all__ = [
    "DataSection",
    "EngineSection",
    "EvalSection",
    "ModelSection",
    "OffloadSection",
    "Recipe",
    "ReflectSection",
    "SearchSection",
    "Section",
    "SelectSection",
    "Source",
    "name_methods",
    "name_scorer",
]

DataFormat = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"]
Tracker = Literal["none", "tensorboard", "wandb", "mlflow", "trackio"]


class Section(BaseModel):
    """Base of the sections: unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(Section):
    """The base model."""

    name_or_path: str = Field(min_length=1, description="Hub id, folder, .gguf file, or bundled:smollm2-135m-instruct.")
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub; null: the main branch.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of the base weights; auto: the fastest that the device computes in."
    )
    attn_implementation: str = Field(
        default="auto", description="Attention as transformers calls it (sdpa, eager, ...); auto: the fastest here."
    )
    trust_remote_code: bool = Field(default=False, description="Whether code that comes with the model may run.")
    tied: Literal["keep", "untie"] = Field(
        default="keep", description="What to do with input and output embeddings that share their weights."
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(default="auto", description="auto: an accelerator if any.")


class Source(Section):
    """One place that rows come from."""

    path: str = Field(min_length=1, description="File, datasets folder, hub name, or shipped:NAME.")
    split: str | None = Field(default=None, description="Split of a hub name or folder; null: train.")
    weight: float = Field(
        default=1.0, gt=0, description="Rows taken of this source, in multiples of its size: 0.5 is half, 2 is twice."
    )
    format: DataFormat | None = Field(default=None, description="Form of this source's rows; null: data.format.")
    subset: str | None = Field(default=None, description="Configuration name of a hub data set.")
    columns: dict[str, str] | None = Field(
        default=None, description="Our column name -> this source's; null: data.columns."
    )
    task: str | None = Field(
        default=None, description="Task of rows without a column `task`, for methods that route; null: the file's name."
    )


def _as_sources(value: Any) -> Any:
    """Accepts a path, one mapping, or a list of both."""
    if isinstance(value, str | Mapping | Source):
        value = [value]
    return (
        [{"path": entry} if isinstance(entry, str) else entry for entry in value] if isinstance(value, list) else value
    )


def _as_held_out(value: Any) -> Any:
    """Accepts what :func:`_as_sources` does, or how many of the training rows are held out."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _as_sources(value)
    if value <= 0 or (isinstance(value, float) and value >= 1):
        raise PydanticCustomError("held_out", "a share of the rows in (0, 1), a number of rows from 1, or a path")
    return value


_AnySource = str | Source | list[str | Source]


class DataSection(Section):
    """Where the rows come from and how they become examples."""

    train: Annotated[
        list[Source],
        BeforeValidator(_as_sources, json_schema_input_type=_AnySource),
        Field(min_length=1, description="Path, hub name, {path, split, weight, format, ...}, or a list of those."),
    ]
    eval: Annotated[
        list[Source] | float | int | None,
        BeforeValidator(_as_held_out, json_schema_input_type=_AnySource | float | int | None),
        Field(description="Held-out rows: as train, a float in (0, 1) for a share, or an int for a number of rows."),
    ] = None
    calibration: Annotated[
        list[Source] | None,
        BeforeValidator(_as_sources, json_schema_input_type=_AnySource | None),
        Field(description="Rows that methods choose by, where those are not the training rows: as train."),
    ] = None
    format: DataFormat = Field(default="auto", description="Form of the rows; auto: found out by the columns.")
    columns: dict[str, str] = Field(default={}, description="Our column name -> the data's, where they differ.")
    system: str | None = Field(default=None, description="System message for conversations that have none.")
    template: NamedTemplate = Field(
        default=None,
        description="Words for the rows of a labelled data set: the name of a shipped template (sst2, boolq, rte), "
        "or {prompt: '{sentence} It was', label: label, answers: [' terrible', ' great']}.",
    )
    chat_template: str = Field(
        default="tokenizer",
        description="tokenizer (the model's own), a name (`finetune ls templates`), or a .jinja path.",
    )
    loss_on: Literal["assistant", "completion", "all", "last"] = Field(
        default="assistant", description="Which tokens are learned: every answer, the completion, all, the last answer."
    )
    max_length: int = Field(default=1024, ge=2, description="Longest example, in tokens.")
    truncation: Literal["drop", "left", "right"] = Field(
        default="drop", description="What happens to longer examples: dropped, or cut on that side."
    )
    packing: bool = Field(default=False, description="Whether several examples share a row; none sees another.")
    on_error: Literal["fail", "skip"] = Field(default="fail", description="What happens to rows that are unusable.")
    max_dropped: float = Field(
        default=0.1, ge=0, le=1, description="Largest share of the examples that may be dropped, in [0, 1]."
    )
    selection: bool = Field(
        default=False, description="Whether training uses only the rows that the select section keeps of data.train."
    )
    group_by_length: bool = Field(default=True, description="Whether batches hold examples of similar length.")
    cache: bool = Field(default=True, description="Whether prepared data are kept for the next run.")


class OffloadSection(Section):
    """What is kept elsewhere until it is computed with."""

    weights: Literal["none", "cpu", "disk", "mmap"] = Field(
        default="none",
        description="Frozen weights of the blocks; disk: read into buffers block by block; mmap: paged in by the "
        "system; cpu: shards of fsdp or ZeRO-3 wait in the CPU's memory; none: where they are computed with.",
    )
    slots: int = Field(default=2, ge=2, description="Buffers of weights: disk, each of a block's size.")
    optimizer: Literal["none", "cpu"] = Field(
        default="none",
        description="Optimizer state; cpu: it stays in the CPU's memory, and the step is computed there (deepspeed).",
    )
    activations: Literal["none", "cpu", "disk"] = Field(
        default="none",
        description="Where what the backward pass needs waits for it; disk: in a file, for models on the CPU; cpu: in "
        "the CPU's memory, for models on an accelerator; none: where it was computed.",
    )


class DeepspeedSection(Section):
    """DeepSpeed's ZeRO."""

    stage: Literal[1, 2, 3] = Field(
        default=2,
        description="What is spread over the processes: 1: the optimizer's state; 2: gradients too; 3: weights too.",
    )
    config: dict[str, Any] | str | None = Field(
        default=None,
        description="DeepSpeed's own configuration for what the recipe does not say, or a JSON file that holds it; "
        "null: none.",
    )


class EngineSection(Section):
    """Processes and devices."""

    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp", "deepspeed"] = Field(
        default="auto",
        description="How several processes share the model. ddp: each has all of it; fsdp: sharded over all; hsdp: "
        "sharded within groups; deepspeed: ZeRO; auto: one process alone, several by ddp where the model fits on each, "
        "else by fsdp.",
    )
    shard_size: int | None = Field(
        default=None,
        ge=2,
        description="Processes that share one copy of the model with hsdp; null: those of a machine.",
    )
    gather_dtype: Literal["int8"] | None = Field(
        default=None,
        description="Dtype in which fsdp and hsdp gather the frozen weights of blocks, for adapters; int8 rounds them, "
        "as a quantised base does; null: their own.",
    )
    deepspeed: DeepspeedSection = Field(default=DeepspeedSection(), description="ZeRO, with strategy deepspeed.")
    offload: OffloadSection = Field(
        default=OffloadSection(), description="What is kept elsewhere until it is computed with."
    )


class EvalSection(Section):
    """What the model is measured on before and after training."""

    tasks: list[str | dict[str, Any]] = Field(
        default=[], description="Names of shipped tasks, paths of task files, KIND:DATA, or the content of a task file."
    )
    limit: int | None = Field(default=None, ge=1, description="Most rows per task; null: all.")
    batch_size: int = Field(default=16, ge=1, description="Rows per batch.")
    max_new_tokens: int = Field(default=64, ge=1, description="Longest generated answer, in tokens.")
    samples: int = Field(default=4, ge=0, description="Answers that the report shows.")
    before: bool = Field(default=True, description="Whether the base model is measured too, before training.")


class SearchSection(Section):
    """How `finetune search` finds the layers and modules that cofitune trains."""

    speciality: list[str | dict[str, Any]] = Field(
        default=[], description="Tasks that the model is to get better at, as eval.tasks; empty: those of eval."
    )
    versatility: list[str | dict[str, Any]] = Field(
        default=[], description="Tasks that the model is to stay good at, as eval.tasks: general suites, or loss:DATA."
    )
    speciality_weight: float = Field(default=1.0, ge=0, description="Weight of speciality in the sum that decides.")
    versatility_weight: float = Field(default=1.0, ge=0, description="Weight of versatility in it.")
    beam: int = Field(default=1, ge=1, description="Candidates of each level that are taken apart further.")
    max_runs: int | None = Field(default=None, ge=1, description="Most training runs; null: as many as the tree has.")
    max_steps: int | None = Field(default=None, ge=1, description="Optimizer steps after which no run is begun.")


def name_scorer(value: Any) -> Any:
    """Returns ``{name: ...}`` for a bare name."""
    return {"name": value} if isinstance(value, str) else value


class SelectSection(Section):
    """What `finetune select` scores rows by, and which it keeps; every limit that is given holds."""

    scorer: Annotated[
        dict[str, Any],
        BeforeValidator(name_scorer, json_schema_input_type=str | dict[str, Any]),
        Field(description="What scores the rows: a name (`finetune ls selectors`), or {name, and its own keys}."),
    ] = {"name": "ifd"}
    compare: list[str | dict[str, Any]] = Field(
        default=["random", "length"], description="Scorers that `finetune select --compare` sets beside the scorer."
    )
    keep: Literal["auto", "highest", "lowest", "middle"] = Field(
        default="auto", description="Which end of the scores is kept; auto: what the scorer is meant for."
    )
    top: int | None = Field(default=None, ge=1, description="Most rows.")
    fraction: float | None = Field(
        default=None, gt=0, le=1, description="Most rows as a share of those that have a score, in (0, 1]."
    )
    budget: int | None = Field(default=None, ge=1, description="Most tokens, prompts and answers together.")
    threshold: float | None = Field(
        default=None, description="Score that a row has at least; at most, where the lowest are kept."
    )
    per_source: Literal["equal", "proportional"] | None = Field(
        default=None, description="Rows of each source: the same number, or its share of the pool; null: as they rank."
    )
    source_column: str | None = Field(
        default=None, description="Column that says where a row is from; null: its file is its source."
    )
    duplicates: Literal["keep", "exact", "near"] = Field(
        default="keep",
        description="Of rows that say the same, the one that ranks highest is kept; near: almost the same, by MinHash.",
    )
    decontaminate: list[str] = Field(
        default=[], description="Evaluation data, as data.train names it: rows that share a run of words with it go."
    )
    decontaminate_words: int = Field(default=13, ge=2, description="Words of such a run.")
    diversity: float | None = Field(
        default=None,
        ge=-1,
        le=1,
        description="Largest cosine between the vectors of two kept rows, by the recipe's model; null: whatever it is.",
    )
    duplicate_threshold: float = Field(
        default=0.8, gt=0, le=1, description="Share of their five-word sequences that near duplicates have in common."
    )
    batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Rows times tokens of the longest one that the model takes at a time; null: 2048 on a CPU, "
        "16384 on an accelerator.",
    )


class ReflectSection(Section, ChatConfig):
    """Who rewrites rows for `finetune reflect`, and which versions are kept."""

    model: str | None = Field(
        default=None,
        description="The teacher: a name at the endpoint, or as model.name_or_path; null: the model itself.",
    )
    max_new_tokens: int = Field(default=2048, ge=1, description="Longest reflection, in tokens.")
    metric: Literal["ppl", "loss"] = Field(default="ppl", description="Form of IFD and r-IFD, as of the scorer ifd.")
    keep: Literal["improved", "all"] = Field(
        default="improved",
        description="improved: rows whose answer the teacher made better; all: also those where another version won.",
    )


def name_methods(value: Any) -> Any:
    """Returns a method section with ``{name: ...}`` for each bare name, alone or in a list."""
    if isinstance(value, list):
        return [name_methods(entry) for entry in value]
    return {"name": value} if isinstance(value, str) else value


class Recipe(Section):
    """A whole run."""

    model: ModelSection = Field(description="The base model.")
    method: Annotated[
        dict[str, Any] | list[dict[str, Any]],
        BeforeValidator(name_methods, json_schema_input_type=str | dict[str, Any] | list[str | dict[str, Any]]),
        Field(description="What trains: {name, and the method's own keys}, or a list of those, in order."),
    ] = {"name": "lora"}
    data: DataSection = Field(description="Where the rows come from and how they become examples.")
    train: dict[str, Any] = Field(default={}, description="transformers.TrainingArguments, field by field.")
    engine: EngineSection = Field(default=EngineSection(), description="Processes and devices.")
    eval: EvalSection = Field(default=EvalSection(), description="What the model is measured on.")
    search: SearchSection = Field(default=SearchSection(), description="How `finetune search` finds what to train.")
    select: SelectSection = Field(
        default=SelectSection(), description="What `finetune select` scores rows by, and which it keeps."
    )
    reflect: ReflectSection = Field(
        default=ReflectSection(), description="Who rewrites rows for `finetune reflect`, and which versions it keeps."
    )
    output_dir: str = Field(min_length=1, description="Folder of the run.")
    seed: int = Field(default=42, ge=0, description="Seed of everything random.")
    report_to: Tracker | list[Tracker] = Field(default="none", description="Trackers that get the metrics.")
