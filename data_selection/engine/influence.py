"""How much a step on one row helps another: cosines between randomly projected LoRA gradients.

Legend: P trained parameters, K numbers of a projected gradient.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from finetune.data_selection.engine.rater import Rater

if TYPE_CHECKING:
    from torch import Tensor

    from finetune.data_selection.pool import Example

__all__ = ["CountSketch", "WarmUp", "adam_direction"]


class CountSketch:
    """A random projection from P numbers to K: each number is added to one random place with a random sign.

    Inner products keep their expectation, with the variance of a dense projection by signs, at O(P) per vector in
    place of O(P K); the matrix is 5 bytes per parameter.

    Args:
        size: P.
        width: K.
        seed: Of places and signs.
        device: Where vectors are.
    """

    def __init__(self, size: int, width: int, seed: int, device: Any) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        self._width = width
        self._places_P = torch.randint(width, (size,), generator=generator, dtype=torch.int32).to(device)
        signs_P = torch.randint(2, (size,), generator=generator, dtype=torch.int8) * 2 - 1
        self._signs_P = signs_P.to(device)

    def __call__(self, vector_P: Tensor) -> Tensor:
        """Returns the projection, (K,) float32."""
        import torch

        projected_K = torch.zeros(self._width, device=vector_P.device)
        return projected_K.index_add_(0, self._places_P, vector_P.float() * self._signs_P)


def adam_direction(
    gradient_P: Tensor, first_P: Tensor, second_P: Tensor, *, betas: tuple[float, float], eps: float
) -> Tensor:
    """Returns where Adam would step on a gradient: ``m' / sqrt(v' + eps)`` without bias correction, (P,).

    Args:
        gradient_P: Of one row.
        first_P: Adam's first moment m.
        second_P: Adam's second moment v.
        betas: Its decay rates.
        eps: Inside the root, as in the published code.
    """
    first = betas[0] * first_P + (1 - betas[0]) * gradient_P
    second = betas[1] * second_P + (1 - betas[1]) * gradient_P**2
    return first / (second + eps).sqrt()


class WarmUp:
    """A LoRA that trains on a sample of the rows, epoch by epoch; gradients are taken where it stands.

    Args:
        rater: The model; LoRA is put on all its linear layers.
        rows: The sample.
        epochs: Epochs in all; the learning rate falls linearly to zero over them.
        r: Rank.
        lora_alpha: Scale of the update times ``r``.
        learning_rate: Of AdamW, at the start.
        batch_rows: Rows of an optimizer step.
        seed: Of the adapter and of the order of the rows.
    """

    betas, eps = (0.9, 0.999), 1e-8

    def __init__(
        self,
        rater: Rater,
        rows: Sequence[Example],
        *,
        epochs: int,
        r: int,
        lora_alpha: int,
        learning_rate: float,
        batch_rows: int,
        seed: int,
    ) -> None:
        import torch
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = LoraConfig(r=r, lora_alpha=lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
            self._model: Any = get_peft_model(rater.model, config).eval()
        self._device = rater.device
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=learning_rate, betas=self.betas, eps=self.eps)
        self._rows, self._batch_rows, self._order = list(rows), batch_rows, random.Random(seed)
        steps = epochs * -(-len(self._rows) // batch_rows)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: max(0.0, 1 - step / steps))
        self.epoch = 0
        self.mean_learning_rate = 0.0

    @property
    def size(self) -> int:
        """P."""
        return sum(parameter.numel() for parameter in self._trained)

    def train_epoch(self) -> None:
        """Trains one epoch more; :attr:`mean_learning_rate` is then that of its steps."""
        order = self._order.sample(self._rows, len(self._rows))
        rates = []
        for start in range(0, len(order), self._batch_rows):
            batch = order[start : start + self._batch_rows]
            for row in batch:
                (self._loss(row) / len(batch)).backward()  # type: ignore[no-untyped-call]
            rates.append(float(self._schedule.get_last_lr()[0]))
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._schedule.step()
        self.epoch += 1
        self.mean_learning_rate = sum(rates) / len(rates)

    def gradient(self, row: Example) -> Tensor:
        """Returns the gradient of a row's mean loss, (P,) float32."""
        import torch

        gradients = torch.autograd.grad(self._loss(row), self._trained)
        return torch.cat([gradient.detach().float().flatten() for gradient in gradients])

    def moments(self) -> tuple[Tensor, Tensor]:
        """Returns Adam's moments m and v, each (P,) float32."""
        import torch

        states = [self._optimizer.state[parameter] for parameter in self._trained]
        first, second = (
            torch.cat([state[name].float().flatten() for state in states]) for name in ("exp_avg", "exp_avg_sq")
        )
        return first, second

    def _loss(self, row: Example) -> Tensor:
        import torch

        ids = torch.tensor([row.encoded.input_ids], device=self._device)
        labels = torch.tensor([row.encoded.labels], device=self._device)
        loss: Tensor = self._model(input_ids=ids, labels=labels, use_cache=False).loss
        return loss
