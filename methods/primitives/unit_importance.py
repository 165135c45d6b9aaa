"""How much a model's general ability hangs on its feed-forward units and attention heads (CoFiTune, section 3.2).

Every unit gets a gate of one that multiplies its output. Its importance is the mean over examples of the absolute
gradient of a proxy loss with respect to the gate, set against that of the other units of its layer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from finetune.core.errors import ConfigError
from finetune.methods.primitives.calibration import Batches, run_batches, single_examples

__all__ = ["Estimator", "Gate", "Normalize", "normalized", "read_importance", "unit_importance"]

Estimator = Literal["loss_grad", "kl_dropout"]
Normalize = Literal["tanh_relu", "tanh_abs"]

DROPOUT = 0.003
"""Of ``kl_dropout``, as in the authors' code."""


@dataclass(frozen=True)
class Gate:
    """Where a group of units is gated.

    Attributes:
        layer: Name of the linear layer.
        on_input: Whether its input is gated (attention heads) or its output.
        first: The first gated feature.
        units: Number of units.
        width: Features of one unit.
    """

    layer: str
    on_input: bool
    first: int
    units: int
    width: int = 1


def unit_importance(
    model: nn.Module, gates: Mapping[str, Gate], batches: Batches, *, estimator: Estimator, seed: int = 0
) -> dict[str, Tensor]:
    """Returns by name of a gate the mean absolute gradient of each unit, float32 (units,).

    Each row of a batch is an example of its own, however the rows are batched. The model is left as it was.

    Args:
        model: A causal LM, frozen.
        gates: Where.
        batches: What the model takes: ``input_ids``, ``labels``, ``attention_mask``, int64 (B, T).
        estimator: The proxy loss: ``loss_grad``, the language-model loss; ``kl_dropout``, the divergence between two
            passes with dropout on the gated features, summed over tokens.
        seed: Of the dropout.

    Raises:
        DataError: A loss is not finite: a row has no labels, for example.
    """
    totals = {name: torch.zeros(gate.units) for name, gate in gates.items()}
    ones = {name: _ones(model, gate) for name, gate in gates.items()}
    by_divergence = estimator == "kl_dropout"
    dropout, proxy = (DROPOUT, functools.partial(_divergence, model)) if by_divergence else (0.0, None)
    losses = run_batches(model, single_examples(batches), proxy)
    examples = 0
    with ExitStack() as stack, torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, gate in gates.items():
            stack.callback(_put_on(model, gate, ones[name], dropout).remove)
        for loss in losses:
            examples += 1
            loss.backward()  # type: ignore[no-untyped-call]
            for name, one in ones.items():
                # Cleared after every example: what is left would count once more for each that follows.
                gradient, one.grad = one.grad, None
                assert gradient is not None
                totals[name] += gradient.abs().cpu()
    return {name: total / max(1, examples) for name, total in totals.items()}


def normalized(importance: Tensor, normalize: Normalize) -> Tensor:
    """Returns the importance of each unit among those of its layer, in [0, 1); zero where all are the same.

    ``tanh_abs`` is ``|tanh(z)|`` of the standardised values as published, which protects the least important units as
    much as the most important; ``tanh_relu`` protects the latter only.
    """
    centred = importance.double() - importance.double().mean()
    spread = centred.std()
    # Of equal values only rounding is left.
    if importance.numel() < 2 or spread <= 1e-12 * importance.abs().max():
        return torch.zeros_like(importance)
    scores = torch.tanh(centred / spread)
    return (scores.abs() if normalize == "tanh_abs" else scores.clamp(min=0)).to(importance.dtype)


def read_importance(files: Sequence[str], gates: Mapping[str, Gate]) -> list[dict[str, Tensor]]:
    """Returns the importance that each file (safetensors: name of a gate -> (units,)) gives to ``gates``.

    Raises:
        ConfigError: A file cannot be read, or belongs to another model.
    """
    return [_read(Path(file), gates) for file in files]


def _read(path: Path, gates: Mapping[str, Gate]) -> dict[str, Tensor]:
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            "the file of importances cannot be read", where="method.importance", got=f"{path}: {error}"
        ) from error
    wrong = [name for name, gate in gates.items() if name not in stored or stored[name].shape != (gate.units,)]
    if wrong:
        raise ConfigError(
            "the file of importances belongs to another model",
            where="method.importance",
            got=f"{path}, where {len(wrong)} of {len(gates)} are missing or of another size: {wrong[0]}",
            want=f"{gates[wrong[0]].units} units",
        )
    broken = [name for name in gates if not bool((torch.isfinite(stored[name]) & (stored[name] >= 0)).all())]
    if broken:
        raise ConfigError(
            "importances are finite and not negative", where="method.importance", got=f"{path}: {', '.join(broken[:3])}"
        )
    return {name: stored[name].float() for name in gates}


def _ones(model: nn.Module, gate: Gate) -> Tensor:
    device = next(model.get_submodule(gate.layer).parameters()).device
    return torch.ones(gate.units, device=device, requires_grad=True)


def _put_on(model: nn.Module, gate: Gate, ones: Tensor, dropout: float) -> RemovableHandle:
    """Multiplies the features of a gate by it, after dropout."""
    stop = gate.first + gate.units * gate.width

    def gated(features: Tensor) -> Tensor:
        own = F.dropout(features[..., gate.first : stop], dropout) if dropout else features[..., gate.first : stop]
        own = own * ones.to(own.dtype).repeat_interleave(gate.width)
        return torch.cat([features[..., : gate.first], own, features[..., stop:]], dim=-1)

    layer = model.get_submodule(gate.layer)
    if gate.on_input:
        return layer.register_forward_pre_hook(lambda module, args: (gated(args[0]), *args[1:]))
    return layer.register_forward_hook(lambda module, args, output: gated(output))


def _divergence(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """Returns the divergence between two passes of a model with dropout, summed over tokens."""
    unlabelled = {**batch, "labels": None}
    first, second = (model(**unlabelled).logits.float().log_softmax(-1).flatten(0, -2) for _ in range(2))
    return F.kl_div(second, first, reduction="sum", log_target=True)
