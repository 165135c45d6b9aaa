"""Low-rank directions ``Z = U V^T / sqrt(r)`` of linear layers, applied beside weights that are only read."""

# Legend: N in_features, M out_features, r rank of a direction, K columns that have been learned so far

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.methods.primitives.dense_directions import direction_numbers
from finetune.methods.primitives.hash_noise import derive_key, hash_tile, noise_of_hash, row_vectors
from finetune.methods.primitives.projections import in_features, out_features

__all__ = ["LowRankDirections", "SideBranch"]

_BRANCH = "side_branch"


class SideBranch(nn.Module):
    """What is learned beside one linear layer, ``y += (x right) left^T``, and the perturbation of a pass.

    Buffers, so that they go where the layer goes; ``state_dict`` does not show them: the base's keys stay.

    Args:
        layer: An ``nn.Linear`` of any kind, or ``Conv1D``.
    """

    left: Tensor
    right: Tensor

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.widths = in_features(layer), out_features(layer)
        device = next(layer.parameters()).device
        self.register_buffer("left", torch.zeros(self.widths[1], 0, device=device), persistent=False)
        self.register_buffer("right", torch.zeros(self.widths[0], 0, device=device), persistent=False)
        self.perturbation: tuple[Tensor, Tensor] | None = None
        self._layer = (layer,)  # in a tuple, it is no submodule of its own submodule
        layer.add_module(_BRANCH, self)
        self._hook = layer.register_forward_hook(self._add)

    def remove(self) -> None:
        """Makes the layer plain."""
        self._hook.remove()
        delattr(self._layer[0], _BRANCH)

    def plain_factors(self, adapter: str = "") -> tuple[Tensor, Tensor]:
        """Returns A (K, N) and B (M, K) of which the product is the change, as LoRA has them."""
        return self.right.t(), self.left

    def _add(self, layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        left, right = self.left, self.right
        if self.perturbation is not None:
            # Columns of their own: added to what was learned, a small perturbation would be rounded away in 16 bit.
            left = torch.cat([left, self.perturbation[0]], 1)
            right = torch.cat([right, self.perturbation[1]], 1)
        inner = F.linear(given[0].to(output.dtype), right.t().to(output.dtype).contiguous()).flatten(0, -2)
        output.view(-1, output.shape[-1]).addmm_(inner.to(output.dtype), left.t().to(output.dtype))
        return output


class LowRankDirections:
    """Directions whose left factors are new at every step and whose right factors stay for an interval (LOZO).

    Of every interval a layer keeps the sum of its steps, M numbers per rank in float32, and the signs of V: the rank of
    what was learned grows with the number of intervals, and the weights are never written.

    Args:
        layers: The linear layers, by the names of their weights.
        seed: Of the whole run.
        queries: Directions per step.
        rank: Of one direction.
        interval: Steps that V stays for.
        momentum: Share of the last step's left factors that the next one keeps: ``M <- b M + (1 - b) d U``, M in place
            of ``d U`` for a distance d (LOZO-M).

    Attributes:
        queries: Directions per step; a state that more processes made has more.
        momenta: M of every layer, float32 (M, queries r); without momentum, none.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        *,
        seed: int,
        queries: int,
        rank: int,
        interval: int,
        momentum: float = 0.0,
    ) -> None:
        self.branches = {name: SideBranch(layer) for name, layer in layers.items()}
        self._momentum = momentum
        self.momenta: dict[str, Tensor] = {}
        self._numbers = direction_numbers(list(layers))
        self._seed, self.queries, self._rank, self._interval = seed, queries, rank, interval
        self.step = 0
        self._drawn: tuple[int, dict[str, Tensor]] = (-1, {})
        self._open_interval()
        if momentum:
            self.momenta = {name: branch.left.clone() for name, branch in self.branches.items()}

    @property
    def columns(self) -> int:
        """Rank of what one interval learns: queries times rank."""
        return self.queries * self._rank

    def remove(self) -> None:
        """Makes the layers plain."""
        for branch in self.branches.values():
            branch.remove()

    @contextlib.contextmanager
    def perturbed(self, query: int, scale: float) -> Iterator[None]:
        """Makes every forward pass see ``W + scale Z``."""
        left = self._left_factors()
        own = slice(query * self._rank, (query + 1) * self._rank)
        try:
            for name, branch in self.branches.items():
                open_right = branch.right[:, -self.columns :][:, own]
                branch.perturbation = (left[name][:, own] * scale, open_right)
            yield
        finally:
            for branch in self.branches.values():
                branch.perturbation = None

    @torch.no_grad()
    def move(self, distances: Tensor, *, decay: float = 1.0) -> None:
        """Adds ``sum_i distances[i] Z_i``; decay pulls what was learned towards nothing, which is the base.

        A step of no length, as one whose loss is not finite, moves nothing: momentum waits for the next.
        """
        left = self._left_factors()
        along = distances.repeat_interleave(self._rank)
        moves = not self.momenta or bool(distances.any())
        for name, branch in self.branches.items():
            if decay != 1.0:
                branch.left.mul_(decay)
            if moves:
                branch.left[:, -self.columns :].add_(self._smoothed(name, left[name] * along))
        self.step += 1
        if self.step % self._interval == 0:
            self._open_interval()

    def shapes(self, steps: int) -> dict[str, tuple[int, int]]:
        """Returns the shape of every left factor after so many steps, by the name of the weight."""
        columns = self.columns * (steps // self._interval + 1)
        return {name: (branch.widths[1], columns) for name, branch in self.branches.items()}

    @torch.no_grad()
    def restore(self, left: Mapping[str, Tensor], momenta: Mapping[str, Tensor], steps: int) -> None:
        """Goes to where ``steps`` steps have led, with the left factors and momenta that they came to."""
        self.step = steps
        self.momenta = {name: momenta[name].to(own, copy=True) for name, own in self.momenta.items()}
        for name, branch in self.branches.items():
            branch.left = left[name].to(branch.left)
            rights = [self._right_factor(name, branch, i) for i in range(steps // self._interval + 1)]
            branch.right = torch.cat(rights, 1)

    def _smoothed(self, name: str, change: Tensor) -> Tensor:
        if name not in self.momenta:
            return change
        return self.momenta[name].mul_(self._momentum).add_(change, alpha=1 - self._momentum)

    def _open_interval(self) -> None:
        for name, branch in self.branches.items():
            fresh = branch.left.new_zeros(branch.widths[1], self.columns)
            branch.left = torch.cat([branch.left, fresh], 1)
            right = self._right_factor(name, branch, self.step // self._interval)
            if name in self.momenta:
                # The nearest of what the new V can express: M V^T ~ M' V'^T, and V'^T V' is near N times the identity.
                self.momenta[name] = self.momenta[name] @ (branch.right[:, -self.columns :].t() @ right) / len(right)
            branch.right = torch.cat([branch.right, right], 1)

    def _left_factors(self) -> dict[str, Tensor]:
        """Returns U / sqrt(r) of this step for every layer, float32 (M, queries r), drawn once per step."""
        if self._drawn[0] != self.step:
            scale = 1 / math.sqrt(self._rank)
            drawn = {
                name: self._signs(self.step, 2 * self._numbers[name], branch.widths[1], branch.left.device) * scale
                for name, branch in self.branches.items()
            }
            self._drawn = (self.step, drawn)
        return self._drawn[1]

    def _right_factor(self, name: str, branch: SideBranch, interval: int) -> Tensor:
        return self._signs(interval, 2 * self._numbers[name] + 1, branch.widths[0], branch.right.device)

    def _signs(self, epoch: int, number: int, size: int, device: torch.device) -> Tensor:
        """Returns signs, float32 (size, queries r): a query has a key, a rank of it a row of the field."""
        column = torch.arange(size, dtype=torch.int32, device=device)
        keys = [derive_key(self._seed, epoch, query, number) for query in range(self.queries)]
        rows = [noise_of_hash(hash_tile(*row_vectors(k, 0, self._rank, device), column), "rademacher") for k in keys]
        return torch.cat(rows).t().contiguous()
