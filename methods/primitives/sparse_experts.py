"""A trained matrix whose entries are dealt to experts: each is the initial matrix but for the entries that it owns."""

# Legend: E experts, n entries of the matrix, n_i those of expert i

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from finetune.core.errors import ConfigError

__all__ = ["SparseExperts"]


class SparseExperts(nn.Module):
    """The experts of one matrix (MoSA, arXiv 2312.02923), each as one compact vector of the entries that it owns.

    The vectors are parameters of their own, so that an expert that was not drawn has no gradient, and neither momentum
    nor weight decay moves it. They hold values, not changes: weight decay acts on what the matrix is made of. All of
    them together have as many numbers as the matrix.

    Args:
        initial: The matrix that all experts start from, float32.
        experts: Their number; with one, the matrix is an ordinary dense parameter.
        generator: Deals the entries.

    Raises:
        ConfigError: There are more experts than entries.
    """

    order: Tensor | None
    initial: Tensor | None

    def __init__(self, initial: Tensor, experts: int, generator: torch.Generator) -> None:
        super().__init__()
        count = initial.numel()
        if experts > count:
            raise ConfigError(
                "there are more experts than entries to deal",
                where="method.n_experts",
                got=f"{experts} experts, {count} entries",
                want=f"at most {count}",
            )
        self.shape, self.experts = tuple(initial.shape), experts
        self._cuts = [expert * count // experts for expert in range(experts + 1)]
        flat, order, begin = initial.reshape(-1), None, None
        if experts > 1:
            # By rank, never by threshold: no tie is owned twice, and no rounding leaves an entry out.
            order = torch.rand(count, generator=generator, dtype=torch.float64).argsort()
            flat, order = flat[order], order.int()
            begin = initial.reshape(-1) if bool(initial.any()) else None
        self.register_buffer("order", order)
        self.register_buffer("initial", begin)
        for expert in range(experts):
            own = flat[self._cuts[expert] : self._cuts[expert + 1]]
            self.register_parameter(f"expert_{expert}", nn.Parameter(own.clone()))

    def values(self, expert: int) -> nn.Parameter:
        """Returns the values of the entries that an expert owns, float32 (n_i,)."""
        return cast(nn.Parameter, getattr(self, f"expert_{expert}"))

    def index(self, expert: int) -> Tensor:
        """Returns which entries of the flattened matrix an expert owns, int64 (n_i,)."""
        if self.order is None:
            return torch.arange(self._cuts[-1], device=self.values(0).device)
        return self.order[self._cuts[expert] : self._cuts[expert + 1]].long()

    def drawn(self, expert: int) -> Tensor:
        """Returns the matrix of one expert; only what it owns gets a gradient."""
        values = self.values(expert)
        if self.order is None:
            return values.view(self.shape)
        return self._begin(values).index_copy_(0, self.index(expert), values).view(self.shape)

    def merged(self) -> Tensor:
        """Returns the mean over the experts: the initial matrix, and each expert's change over their number."""
        if self.order is None:
            return self.values(0).view(self.shape)
        union = torch.cat([self.values(expert) for expert in range(self.experts)])
        placed = self._begin(union).index_copy_(0, self.order.long(), union)
        mean = placed / self.experts if self.initial is None else self.initial.lerp(placed, 1 / self.experts)
        return mean.view(self.shape)

    def _begin(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._cuts[-1]) if self.initial is None else self.initial.clone()

    def resting(self) -> list[str]:
        """Returns the names of the parameters without a gradient, where another one has a gradient."""
        parameters: dict[str, Any] = dict(self.named_parameters(recurse=False))
        without = [name for name, parameter in parameters.items() if parameter.grad is None]
        return without if len(without) < len(parameters) else []
