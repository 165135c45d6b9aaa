"""A causal-LM loss that never holds all logits: only labelled positions reach the head, and they in chunks.

The model is called as always, ``model(input_ids=..., labels=...)``, by any trainer and under any wrapper. While labels
are given, the output head hands through the hidden states of the labelled positions, and ``model.loss_function`` turns
them into the loss. Where the model does something to its logits (scaling, soft-capping) or the head is adapted, the
head computes, for the labelled positions only.
"""

# Legend: B rows, T tokens of a row, D model width, V vocabulary, N labelled positions of the batch

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from finetune.core.errors import FinetuneWarning
from finetune.core.evaluation_mode import evaluation_mode
from finetune.core.routing import routed

__all__ = ["CHUNK", "LeanLoss", "linear_cross_entropy"]

CHUNK = 256
"""Labelled positions whose logits exist at a time."""
_IGNORED = -100


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor) -> Tensor:
    """Returns the summed cross entropy of ``hidden W^T + bias``, float32, holding :data:`CHUNK` rows of logits."""
    if len(target_N) <= CHUNK:
        logits = F.linear(hidden_ND, weight_VD, bias_V).float()
        return F.cross_entropy(logits, target_N, reduction="sum")
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, chunking_method=None)
    return F.linear_cross_entropy(
        hidden_ND, weight_VD, target_N, linear_bias=bias_V, reduction="sum", options=options
    ).float()


class LeanLoss:
    """Makes ``model`` compute its loss leanly until :meth:`remove`.

    The result is compared with the model's own loss on a short input first; where neither form reproduces it, the model
    is left alone and a warning says that its logits are held whole.

    Args:
        model: A causal LM, plain or wrapped by PEFT, on its device.
        head_whole: Whether the head's weight can be read outside its forward pass.

    Attributes:
        form: ``chunked``, ``selected`` (logits of the labelled positions exist at once), or ``stock``.
    """

    def __init__(self, model: Any, *, head_whole: bool = True) -> None:
        self._model: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        # Some tuners call the forward of the model within, past its hooks; others give it other labels.
        self._called = [self._model] if self._model is model else [model, self._model]
        self._hooks: list[RemovableHandle] = []
        self._head: Any = self._model.get_output_embeddings()
        self._labels: Tensor | None = None
        self._stock_loss = self._model.loss_function
        self.form = "stock"
        with evaluation_mode(model):
            expected = self._probe(model)
            forms = ["chunked", "selected"] if type(self._head) is nn.Linear and head_whole else ["selected"]
            for form in forms:
                self._install(form)
                if torch.allclose(self._probe(model), expected, rtol=1e-2 if expected.dtype != torch.float32 else 1e-5):
                    return
                self.remove()
        warnings.warn(
            f"{type(self._model).__name__} computes its loss in a way of its own, so the logits of every position are "
            "held in memory",
            FinetuneWarning,
            stacklevel=2,
        )

    def remove(self) -> None:
        """Gives the model its own loss back."""
        if self.form != "stock":
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            del self._head.forward
            self._model.loss_function = self._stock_loss
            self.form = "stock"

    def _install(self, form: str) -> None:
        self.form = form
        for module in self._called:
            self._hooks.append(module.register_forward_pre_hook(self._take_labels, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._drop_labels, always_call=True))
        self._head_forward = self._head.forward
        self._head.forward = self._forward_head
        self._model.loss_function = self._loss

    def _take_labels(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._labels = kwargs.get("labels")

    def _drop_labels(self, module: nn.Module, args: Any, output: Any) -> None:
        self._labels = None

    def _forward_head(self, hidden_BTD: Tensor) -> Tensor:
        if self._labels is None:
            logits: Tensor = self._head_forward(hidden_BTD)
            return logits
        labelled_BT = self._labels[:, 1:] != _IGNORED
        hidden_1ND = hidden_BTD[:, :-1][labelled_BT].unsqueeze(0)
        return hidden_1ND if self.form == "chunked" else self._head_forward(hidden_1ND)

    def _loss(
        self, logits: Tensor, labels: Tensor, *args: Any, num_items_in_batch: Tensor | int | None = None, **kwargs: Any
    ) -> Tensor:
        shifted = labels[:, 1:]
        target_N = shifted[shifted != _IGNORED]
        if self.form == "chunked":
            weight, bias = self._head.weight, self._head.bias
            total = linear_cross_entropy(logits[0], weight, bias, target_N)
        else:
            total = F.cross_entropy(logits[0].float(), target_N, reduction="sum")
        return total / (target_N.numel() if num_items_in_batch is None else num_items_in_batch)

    @torch.no_grad()
    def _probe(self, model: nn.Module) -> Tensor:
        ids = torch.arange(8, device=self._head.weight.device).reshape(1, 8) % self._model.config.vocab_size
        labels = ids.clone()
        labels[:, :3] = _IGNORED
        with routed(model):
            loss: Tensor = model(input_ids=ids, labels=labels).loss
        return loss
