"""The methods that are compared in time and memory, each on its own copy of the bundled model.

LoRA adapts all linear layers with r = 8, no dropout; ``lora_default`` keeps the adapters in float32, as PEFT does,
``lora_compute`` in the dtype of the model: in float32 they are the same. ``s2ft`` and ``random`` have their defaults
(1 % of the block weights), ``s2ft_fused`` the fused feed-forward block besides, ``id3`` a budget of 0.1 %,
``id3_every_10`` the same unmasked at every tenth step; ``full`` trains the weights as they are, ``top_layers``
the upper half of the layers so. All have the same batch and lean loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MODEL", "Variant", "build", "claim_name", "default_dtypes", "saved_activation_bytes", "sizes"]

MODEL = "bundled:smollm2-135m-instruct"
_LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
_SETTINGS: dict[str, dict[str, Any]] = {
    "s2ft": {},
    "s2ft_fused": {"fused_mlp": True},
    "id3": {"budget": 0.001},
    "id3_every_10": {"budget": 0.001, "select_every": 10},
    "random": {},
    "full": {"trainable_dtype": "base"},
    "top_layers": {"count": 0.5, "trainable_dtype": "base"},
}
_SCHEDULE = 1000
"""Steps of the run that a few are measured of."""


@dataclass
class Variant:
    """One method on its own copy of the model.

    Attributes:
        model: The model to train.
        step: Takes one optimizer step.
        optimizer: What steps.
        batch: What the model is called with.
        seconds: What steps took.
    """

    model: Any
    step: Callable[[], None]
    optimizer: Any
    batch: dict[str, Any]
    seconds: list[float] = field(default_factory=list)


def build(name: str, dtype: str, rows: int, length: int) -> Variant:
    """Attaches a method to a fresh model and returns its training step."""
    import torch

    import finetune
    from finetune.methods import discover
    from finetune.models import load_model
    from finetune.training.loss import LeanLoss

    model: Any = load_model(MODEL, dtype=dtype, device="cpu", attn_implementation="sdpa")
    model.config.use_cache = False
    if name.startswith("lora"):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(task_type="CAUSAL_LM", **_LORA)
        model = get_peft_model(model, config, autocast_adapter_dtype=name == "lora_default")
    else:
        method = finetune.method(name if name in discover() else name.partition("_")[0], **_SETTINGS[name])
        model = method.attach(model)
        method.bind(total_steps=_SCHEDULE)
    LeanLoss(model)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(100, 40_000, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    # Few labels: the logits are the same for every method, and would hide the difference.
    labels[:, :-4] = -100
    batch = {"input_ids": ids, "labels": labels}

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Variant(model, step, optimizer, batch)


def saved_activation_bytes(variant: Variant) -> int:
    """Returns the bytes that autograd keeps after a forward pass, parameters and buffers left out."""
    import torch

    model = variant.model
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**variant.batch).loss
    total = sum(kept.values())
    loss.backward()
    variant.optimizer.zero_grad()
    return total


def claim_name(variant: str, figure: str) -> str:
    """Returns ``METHOD/FORM_FIGURE``: a claim begins with the registry name of its method."""
    method, _, form = variant.partition("_")
    return f"{method}/{form}_{figure}" if form else f"{method}/{figure}"


def default_dtypes(*, quick: bool) -> list[str]:
    """Returns what is measured if nothing is asked for: in a hurry, not what the CPU only emulates."""
    return ["float32"] if quick and _emulated("bfloat16") else ["float32", "bfloat16"]


def sizes(dtype: str, *, quick: bool) -> tuple[int, int, int]:
    """Returns rows, their length, and rounds: less where the CPU emulates bfloat16, some fifty times slower."""
    emulated = _emulated(dtype)
    rows, length = (1, 8) if emulated else (2, 64) if quick else (4, 128)
    rounds = 1 if emulated and quick else 3 if quick or emulated else 7
    return rows, length, rounds


def _emulated(dtype: str) -> bool:
    import torch

    from finetune.models.dtype import best_dtype

    return dtype == "bfloat16" and best_dtype(torch.device("cpu")) == torch.float32
