"""The passes of a step over several processes: who measures what, and one estimate of it, the same bits everywhere."""

# Legend: G groups of processes, M members of a group, k points of a member

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finetune.core.errors import TrainingError
from finetune.methods.primitives.process_group import gather_over_processes, process_rank, processes
from finetune.methods.primitives.slope_rules import Estimate, Losses, SlopeRule

__all__ = ["SharedPasses"]

_EXACT = 1 << 52
"""Integers below it are exact in float64."""


@dataclass(frozen=True)
class SharedPasses:
    """A mesh of processes, G groups of M: members of a group have the same rows and split the points of a step.

    Every process sends the losses of its points and the weight of its rows, 8 bytes each, and all of them make the same
    estimate of what all of them sent, in the same order.

    Attributes:
        rule: Where losses are measured, and how they become slopes.
        queries: Directions of one group.
        members: M.
        independent: Whether every group has directions of its own, and not the same on other rows.
    """

    rule: SlopeRule
    queries: int
    members: int
    independent: bool

    def __call__(self, loss_at: Losses, eps: float, *, weight: Tensor, batch: Mapping[str, Any]) -> Estimate:
        """Returns the estimate of all processes.

        Args:
            loss_at: Measures on this process's rows.
            eps: The distance.
            weight: Of these rows beside those of other groups, such as their number of labelled tokens, 0-d.
            batch: The rows: tensors of which are compared within a group.

        Raises:
            TrainingError: The processes make no groups of M, or the members of one have different rows.
        """
        if processes() % self.members:
            raise TrainingError(
                "the processes do not divide into groups that split the passes of a step",
                where="method.perturbation_parallel",
                got=f"{self.members}, and {processes()} process(es)",
                want="a divisor of their number",
            )
        group, member = divmod(process_rank(), self.members)
        points = self.rule.points(self.queries)
        own = points[member * len(points) // self.members : (member + 1) * len(points) // self.members]
        first = group * self.queries if self.independent else 0
        losses = self.rule.measure(lambda query, scale: loss_at(first + query, scale), own, eps)
        sent = [losses, weight.to(losses).view(1)]
        if self.members > 1:
            sent.append(_mark(batch, losses))
        every = gather_over_processes(torch.cat(sent))  # (G M, k + 1 or k + 2)
        if self.members > 1:
            _require_same_rows(every[:, -1].view(-1, self.members))
        k = len(own)
        weights = every[:: self.members, k]
        return self._combine(every[:, :k].reshape(len(weights), len(points)), weights, eps)

    def _combine(self, losses: Tensor, weights: Tensor, eps: float) -> Estimate:
        """Returns the estimate from losses (G, points) and the groups' weights (G,)."""
        # The loss of no tokens at all is no number.
        losses = torch.where(weights[:, None] > 0, losses, 0.0) if len(weights) > 1 else losses
        weights = weights / weights.sum()
        if not self.independent:
            return self.rule.estimate((weights[:, None] * losses).sum(0), eps)
        found = [self.rule.estimate(own, eps) for own in losses]
        loss = (weights * torch.stack([one.loss for one in found])).sum()
        return Estimate(loss, (weights[:, None] * torch.stack([one.slopes for one in found])).flatten())


def _mark(batch: Mapping[str, Any], like: Tensor) -> Tensor:
    """Returns a number that other rows are unlikely to have, (1,)."""
    mark = torch.zeros((), dtype=torch.int64, device=like.device)
    for _, value in sorted(batch.items()):
        if isinstance(value, Tensor) and not value.is_floating_point():
            flat = value.flatten().long().to(like.device)
            mark = 31 * mark + (flat * torch.arange(1, len(flat) + 1, device=like.device)).sum()
    return (mark % _EXACT).to(like).view(1)


def _require_same_rows(marks: Tensor) -> None:
    other = (marks != marks[:, :1]).any(1).nonzero().flatten().tolist()
    if other:
        raise TrainingError(
            "the processes of a group split the passes over the same rows, and have been given different ones",
            where="method.perturbation_parallel",
            got=f"group {', '.join(map(str, other))} of {len(marks)}",
            want=f"every {marks.shape[1]} processes in a row with the same batch",
            fix="finetune train gives them out so; in a loop of your own, shard the data by rank // "
            "perturbation_parallel",
        )
