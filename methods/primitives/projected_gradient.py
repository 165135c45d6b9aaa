"""A forward pass that measures the slope of the loss along directions, and a loss whose backward delivers it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from finetune.core.errors import TrainingError
from finetune.core.evaluation_mode import evaluation_mode
from finetune.methods.primitives.labelled_tokens import IGNORED
from finetune.methods.primitives.slope_rules import Estimate, Losses

__all__ = ["OPTIONS", "PARAMETER", "Directions", "Measure", "ProjectedForward"]

PARAMETER = "projected_gradient"
"""Name of the parameter in the model: one element per direction."""
OPTIONS = "options"
"""Key of a batch: how many rows each question has, of which the first is its right option (a list of int)."""


class Directions(Protocol):
    """The random directions of a step, in whatever form."""

    step: int
    """Optimizer steps taken: with the seed, the number that directions are made of."""

    def perturbed(self, query: int, scale: float) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which a forward pass sees the weights moved along one of this step's directions."""

    def move(self, distances: Tensor, *, decay: float = 1.0) -> None:
        """Moves the weights along this step's directions by ``distances`` (queries,), and goes to the next step.

        Args:
            distances: On the weights' device.
            decay: What is decayed is multiplied with it before.
        """

    def remove(self) -> None:
        """Takes off the model what was put on it."""


class Measure(Protocol):
    """Makes one estimate of the losses that a process can measure on its rows."""

    def __call__(self, loss_at: Losses, *, weight: Tensor, batch: dict[str, Any]) -> Estimate:
        """Returns it.

        Args:
            loss_at: Measures on the rows.
            weight: Of these rows beside those of other processes, 0-d.
            batch: The rows.
        """


class _Delivered(torch.autograd.Function):
    """``loss`` as a function of the parameter, whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, loss: Tensor, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(slopes.to(parameter.dtype))
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return grad.to(slopes.dtype) * slopes, None, None


_DELIVER: Callable[..., Tensor] = _Delivered.apply  # torch does not annotate it


class ProjectedForward:
    """Stands in for ``model.forward``: with gradients on it estimates, without it is the model's own.

    The passes run in evaluation mode and without autograd, so that both losses of a direction see the same model. The
    output is that of the last pass, with the loss of the estimate. An object and no method, since accelerate would bind
    a method to the model anew.

    Args:
        model: Whose forward it takes over.
        directions: What moves the weights.
        estimate: Makes the estimate of losses.
        objective: ``objective(model, batch)``: the number that is minimised; None: the loss that the model returns.
    """

    def __init__(
        self,
        model: nn.Module,
        directions: Directions,
        estimate: Measure,
        objective: Callable[..., Any] | None = None,
    ) -> None:
        self._model, self._directions, self._estimate, self._objective = model, directions, estimate, objective
        self._own = model.forward
        functools.update_wrapper(self, model.forward)  # trainers ask for the signature
        model.forward = self

    def remove(self) -> None:
        """Gives the model its own forward back, whatever else was put over it."""
        self._model.__dict__.pop("forward", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model does, the loss being one whose backward delivers the slopes."""
        if self._objective is not None and (torch.is_grad_enabled() or OPTIONS in kwargs):
            # Trainers pass names; whatever else comes first is what the model's forward has first.
            named = dict(zip(inspect.signature(self._own).parameters, args, strict=False))
            return self._by_objective(self._objective, {**named, **kwargs})
        if not torch.is_grad_enabled():
            return self._own(*args, **kwargs)
        if kwargs.get("labels") is None:
            return self._without_loss(*args, **kwargs)
        return self._by_loss(*args, **kwargs)

    def _by_loss(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["use_cache"] = False
        output: Any = None

        def loss_at(query: int, scale: float) -> Tensor:
            nonlocal output
            with self._directions.perturbed(query, scale) if scale else contextlib.nullcontext():
                output = self._own(*args, **kwargs)
            return _loss_of(output)

        loss = self._delivered(loss_at, _labelled_tokens(kwargs), kwargs)
        if isinstance(output, tuple):
            return (loss, *output[1:])
        output["loss"] = loss
        return output

    def _by_objective(self, objective: Callable[..., Any], batch: dict[str, Any]) -> dict[str, Tensor]:
        """Returns the objective as the loss, or its value on held-out data where gradients are off.

        A trainer that accumulates says how many labelled tokens all batches of the step have, and adds up: each counts
        by its own.
        """
        total = batch.pop("num_items_in_batch", None)
        share = 1.0 if total is None else float((batch["labels"] != IGNORED).sum()) / float(total)
        device = next(self._model.parameters()).device

        def loss_at(query: int, scale: float) -> Tensor:
            perturbed = self._directions.perturbed(query, scale) if scale else contextlib.nullcontext()
            # Where the objective draws, both sides draw the same, and nobody else's draws change.
            with perturbed, torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(self._directions.step)
                return share * _number(objective(self._model, dict(batch)), objective, device)

        if torch.is_grad_enabled():
            questions = len(batch[OPTIONS] if OPTIONS in batch else next(iter(batch.values())))
            weight = torch.tensor(1 if total is not None else questions, device=device)
            return {"loss": self._delivered(loss_at, weight, batch)}
        with evaluation_mode(self._model):
            return {"loss": loss_at(0, 0.0).float()}

    def _delivered(self, loss_at: Losses, weight: Tensor, batch: dict[str, Any]) -> Tensor:
        with torch.no_grad(), evaluation_mode(self._model):
            found = self._estimate(loss_at, weight=weight, batch=batch)
        return _DELIVER(self._model.get_parameter(PARAMETER), found.loss.float(), found.slopes)

    def _without_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self._model.training:
            raise TrainingError(
                "a zeroth-order method trains by the loss that the model returns, and it was called without labels",
                where=f"{type(self._model).__name__}.forward",
                want="model(..., labels=labels), the loss being the model's own",
                fix="no label smoothing and no loss function of the trainer's (compute_loss_func)",
            )
        return self._own(*args, **kwargs)


def _labelled_tokens(batch: dict[str, Any]) -> Tensor:
    """Returns how many tokens the loss is the mean of; 1 where a trainer has it divided by those of all rows."""
    labels = batch["labels"]
    if batch.get("num_items_in_batch") is not None or not isinstance(labels, Tensor):
        return torch.ones((), device=labels.device if isinstance(labels, Tensor) else None)
    return (labels[..., 1:] != IGNORED).sum()


def _loss_of(output: Any) -> Tensor:
    loss = output[0] if isinstance(output, tuple) else output.get("loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TrainingError("the model returned no number as its loss", where="output.loss", got=_described(loss))
    return loss.detach().reshape(())


def _number(value: Any, objective: Callable[..., Any], device: torch.device) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().double().reshape(())
    if isinstance(value, numbers.Real):
        return torch.tensor(float(value), dtype=torch.float64, device=device)
    raise TrainingError(
        "the objective returned no number",
        where=f"method.objective {getattr(objective, '__qualname__', objective)}",
        got=_described(value),
        want="a float, or a tensor of one element, that is to be minimised",
    )


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
