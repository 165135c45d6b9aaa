"""The peak memory of a training step, from the model's config and the shapes of what trains.

A model of what PyTorch keeps for the backward pass of a Llama-type block; checked to 0.1 % against a tracker of tensor
storages on a 135M model (full, LoRA in float32 and bfloat16, with and without checkpointing). Other blocks are
approximated by the Llama-type block of the same widths. All sizes in bytes, for one process.
"""

# Legend: T tokens of a micro-batch, h width, f feed-forward width, q query width, k key and value width, n heads,
# V vocabulary, e bytes of the compute dtype, N_t trained scalars

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from finetune.planning.host import available_memory, resident_bytes
from finetune.planning.trained_layers import TrainedLayer, TrainedPlaces, find_trained_places

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["MemoryEstimate", "ModelShape", "estimate_memory", "optimizer_state_bytes"]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_REMEDIES = {
    "activations": "train.activation_checkpointing: true, or a smaller train.per_device_train_batch_size",
    "logits": "a smaller train.per_device_train_batch_size or data.max_length",
    "optimizer": "a method that trains less (finetune ls methods), or train.optim: adafactor",
    "gradients": "a method that trains less (finetune ls methods)",
    "trained": "a method that trains less (finetune ls methods)",
    "weights": "model.dtype: bfloat16, or a smaller model",
    "process": "a smaller train.per_device_train_batch_size",
}


@dataclass(frozen=True)
class MemoryEstimate:
    """The peak memory of a training step.

    Attributes:
        parts: Bytes of each part at the moment of the peak; they add up to ``peak``. ``process`` (the interpreter and
            its libraries), ``weights`` (frozen), ``trained``, ``gradients``, ``optimizer`` (its state), ``activations``
            (kept for the backward pass), ``logits``.
        phase: The moment of the peak.
        available: Bytes that this process may take in total.
        moments: Bytes at each moment of a step that may be the peak.
    """

    parts: dict[str, int]
    phase: str = ""
    available: int = field(default=0, compare=False)
    moments: dict[str, int] = field(default_factory=dict, compare=False)

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether this process may take as much."""
        return self.peak <= self.available

    @property
    def largest(self) -> str:
        """The largest part and its size, in words."""
        name = max(self.parts, key=lambda part: self.parts[part])
        return f"{name} {self.parts[name] / 1e9:.2f} GB"

    @property
    def remedy(self) -> str:
        """The cheapest change that makes the largest part smaller."""
        return _REMEDIES[max(self.parts, key=lambda part: self.parts[part])]

    def as_dict(self) -> dict[str, Any]:
        """Returns everything for a JSON document; sizes in bytes."""
        return {
            "peak_bytes": self.peak,
            "available_bytes": self.available,
            "fits": self.fits,
            "phase": self.phase,
            "parts": self.parts,
            "moments": self.moments,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class ModelShape:
    """The widths of a decoder-only model, as in the legend above; ``head_dim`` is the width of one head."""

    layers: int
    h: int
    f: int
    q: int
    k: int
    n: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelShape:
        """Reads the widths from a model's config, whichever names it has for them."""
        text: Any = config.get_text_config()
        heads, h = int(text.num_attention_heads), int(text.hidden_size)
        head_dim = int(getattr(text, "head_dim", None) or h // heads)
        key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
        f = int(getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * h)
        sizes = (int(text.num_hidden_layers), h, f, heads * head_dim, key_heads * head_dim, heads, head_dim)
        return cls(*sizes, int(text.vocab_size))

    @property
    def inputs(self) -> dict[str, int]:
        """The width of what each linear of a block takes in."""
        h, f = self.h, self.f
        return {"q": h, "k": h, "v": h, "qkv": h, "o": self.q, "gate": h, "up": h, "down": f}


@dataclass(frozen=True)
class _Step:
    """What a training step is, besides the model's shape."""

    shape: ModelShape
    places: TrainedPlaces
    compute: int
    trained_bytes: int
    trained_count: int
    adapter: bool
    tokens: int
    length: int
    checkpointing: bool
    eager: bool
    in_flight: int | None

    @property
    def adapter_bytes(self) -> int:
        return max(1, round(self.trained_bytes / max(1, self.trained_count)))


def estimate_memory(
    config: PreTrainedConfig,
    *,
    trained: Mapping[str, tuple[int, ...]],
    trained_count: int | None = None,
    frozen_bytes: int,
    trained_bytes: int,
    weight_dtype: str,
    micro_batch: int,
    length: int,
    checkpointing: bool = False,
    in_flight: int | None = None,
    attn_implementation: str = "sdpa",
    method_kind: Literal["adapter", "delta", "subset"] = "adapter",
    label_tokens: int | None = None,
    logits_chunk: int | None = None,
    accumulation: int = 1,
    optimizer: str = "adamw_torch_fused",
    process_bytes: int = 0,
    available: int | None = None,
) -> MemoryEstimate:
    """Estimates the peak memory of a training step.

    Args:
        config: The model's config.
        trained: Name -> shape of every trained parameter, or of the tensor that its entries are chosen from.
        trained_count: Scalars that train, where the shapes have another number.
        frozen_bytes: Bytes of all tensors that do not train, buffers included; a tied tensor counts once.
        trained_bytes: Bytes of the trained parameters as they are held, masters included.
        weight_dtype: Dtype in which the model computes: float32, bfloat16 or float16.
        micro_batch: Rows of one forward pass.
        length: Tokens of a row after padding.
        checkpointing: Whether every block keeps its input only and is computed a second time in the backward pass.
        in_flight: Bytes of activations on their way, where activations are put away; None means that they stay.
        attn_implementation: ``eager`` keeps the attention matrix, every other one does not.
        method_kind: Kind of the method: what a trained linear keeps of its input depends on it.
        label_tokens: Positions of a micro-batch that carry loss and reach the head; None means all.
        logits_chunk: Positions whose logits exist at a time; None means all that reach the head.
        accumulation: Micro-batches of one optimizer step: with more than one, gradients are there all the time.
        optimizer: ``optim`` of the training arguments.
        process_bytes: Bytes of the process before the model was loaded: counts where the CPU trains.
        available: Bytes that this process may take in total; None asks the host.

    Returns:
        The estimate, with the parts at the moment of its peak.
    """
    places = find_trained_places(trained)
    if getattr(config.get_text_config(), "tie_word_embeddings", False):
        places.head |= places.embedding
    count = places.count if trained_count is None else trained_count
    step = _Step(
        shape=ModelShape.of(config),
        places=places,
        compute=_BYTES[weight_dtype],
        trained_bytes=trained_bytes,
        trained_count=count,
        adapter=method_kind == "adapter",
        tokens=micro_batch * length,
        length=length,
        checkpointing=checkpointing,
        eager=attn_implementation == "eager",
        in_flight=in_flight,
    )
    static = {
        "process": process_bytes,
        "weights": frozen_bytes,
        "trained": trained_bytes,
        "optimizer": optimizer_state_bytes(optimizer, count),
    }
    phases = _phases(step, step.tokens if label_tokens is None else label_tokens, logits_chunk)
    gradients = trained_bytes if accumulation > 1 else 0
    candidates = []
    for phase, (activations, logits, share) in phases.items():
        moving = {"gradients": max(gradients, share), "activations": activations, "logits": logits}
        candidates.append(MemoryEstimate({**static, **moving}, phase))
    best = max(candidates, key=lambda estimate: estimate.peak)
    room = available_memory() + resident_bytes() if available is None else available
    moments = {estimate.phase: estimate.peak for estimate in candidates}
    return MemoryEstimate(best.parts, best.phase, room, moments)


def optimizer_state_bytes(optimizer: str, count: int) -> int:
    """Returns the bytes that an optimizer keeps for ``count`` trained scalars, by its name in transformers.

    A name that is not known counts as AdamW: two float32 values per scalar.
    """
    name = optimizer.removeprefix("paged_").removeprefix("OptimizerNames.").lower()
    if name in ("sgd", "adafactor", "lomo", "adalomo"):
        return 0
    values, width = (1 if name.startswith(("lion", "rmsprop", "adagrad")) else 2), 4
    if "8bit" in name:
        width = 1
    return values * width * count


def _phases(step: _Step, label_tokens: int, logits_chunk: int | None) -> dict[str, tuple[int, int, int]]:
    """Returns for each moment that may be the peak: bytes of activations, of logits, and of gradients."""
    shape, e, tokens = step.shape, step.compute, step.tokens
    blocks = [_block(step, layer) for layer in range(shape.layers)]
    first = _first_block(step)
    within = max(blocks[first:], default=0) * tokens
    working = 2 * e * (shape.f + shape.h) * tokens
    kept = (e * shape.h * (shape.layers - first) if step.checkpointing else sum(blocks[first:])) * tokens
    kept += (2 * shape.head_dim * e + 8) * tokens  # rotary tables and the loss's own
    if first < shape.layers or step.places.norms:
        kept += (4 * shape.h + 4) * tokens  # the last norm's float32 copy
        if not step.checkpointing and not step.places.embedding and first < shape.layers:
            kept -= _without_gradient(step, first) * tokens
    kept += e * shape.h * (label_tokens if step.places.head else 0) + e * shape.h * tokens * step.places.final_norm
    if step.adapter and step.places.count > step.trained_count:
        kept += step.adapter_bytes * step.places.count  # factors that are laid out from pools when a pass begins
    if step.in_flight is not None:
        kept = min(kept, step.in_flight + within)
    at_once = label_tokens if logits_chunk is None else min(label_tokens, logits_chunk)
    phases = {
        "start of the backward pass": (kept, 12 * shape.vocabulary * at_once, 0),
        "end of the backward pass": (within + working, 0, step.trained_bytes),
    }
    if step.checkpointing:
        phases["first block computed again"] = (kept + within + working, 0, 0)
    return phases


def _first_block(step: _Step) -> int:
    """Returns the first block that keeps anything for the backward pass."""
    if step.places.embedding:
        return 0
    return min(step.places.blocks, default=step.shape.layers)


def _block(step: _Step, layer: int) -> int:
    """Returns the bytes that one block keeps per token."""
    shape, e = step.shape, step.compute
    trained = step.places.blocks.get(layer, {})
    kept = 8 * shape.h + 8  # two norms, each with a float32 copy of its input and a root
    kept += 2 * e * shape.h if "norm" in trained else 0
    kept += 2 * e * shape.q + 2 * e * shape.k + 4 * shape.n + 3 * e * shape.f
    if step.eager:
        kept += (4 if e == 4 else 6) * shape.n * step.length
    linears = {place: layer for place, layer in trained.items() if place in shape.inputs}
    kept += _kept_inputs(step, linears)
    if step.adapter:
        kept += sum(step.adapter_bytes * layer.rank for layer in linears.values())
    return kept


def _without_gradient(step: _Step, first: int) -> int:
    """Returns the bytes per token that the first block does not keep, since no gradient goes into it."""
    shape, e = step.shape, step.compute
    trained = step.places.blocks.get(first, {})
    spared = 4 * shape.h + 4  # the first norm's input
    if not trained.keys() & {"norm", "q", "k", "v", "qkv", "other"}:
        spared += 2 * e * shape.q + 2 * e * shape.k + 4 * shape.n
        output = trained.get("o")
        spared -= e * shape.q if output is not None and not output.columns else 0
    if trained.keys() == {"down"}:
        spared += 3 * e * shape.f + 4 * shape.h + 4
    return spared


def _kept_inputs(step: _Step, linears: Mapping[str, TrainedLayer]) -> int:
    """Returns the bytes per token of what trained linears keep of their inputs."""
    shape, e = step.shape, step.compute
    if step.adapter and step.adapter_bytes > e:
        # Adapters in float32 on a 16-bit model cast their input, each for itself.
        return sum(step.adapter_bytes * shape.inputs[place] for place in linears)
    slices = sum(e * layer.columns for layer in linears.values() if layer.columns)
    whole = {place for place, layer in linears.items() if not layer.columns}
    kept = e * shape.h * bool(whole & {"q", "k", "v", "qkv"})  # one input for all; o shares the attention's output
    kept += e * shape.h * bool(whole & {"gate", "up"})
    return kept + e * shape.f * ("down" in whole) + slices
