"""A linear layer with a low-rank update whose factors are gathered from pools that layers share.

``A = reshape(SA[I_A], (r, a))``, ``B^T = reshape(SB[I_B], (r, b))`` and ``y = base(x) + s ((x A^T) * m) B^T``, where m
is a frozen factor per rank in some plans and one in others (MoS, arXiv 2410.00938, section 3).
"""

# Legend: T tokens (all leading dimensions), a in_features, b out_features, r rank

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft.tuners._buffer_dict import BufferDict
from torch import Tensor, nn

from finetune.methods.primitives.low_rank_layer import LowRankLayer, product_dtype

__all__ = ["LinearShards", "unused_shards"]


class _Pools(MutableMapping[str, nn.Parameter]):
    """One factor's pool of a layer's group, by adapter, as PEFT expects it on the layer; the tuner owns it."""

    def __init__(self, owned: Any, groups: dict[str, str]) -> None:
        self._owned, self._groups = owned, groups

    def __getitem__(self, adapter: str) -> nn.Parameter:
        return cast(nn.Parameter, self._owned[adapter][self._groups[adapter]])

    def __setitem__(self, adapter: str, pool: nn.Parameter) -> None:
        self._owned[adapter][self._groups[adapter]] = pool

    def __delitem__(self, adapter: str) -> None:
        del self._owned[adapter][self._groups[adapter]]
        if not self._owned[adapter]:
            del self._owned[adapter]

    def __iter__(self) -> Iterator[str]:
        return (name for name, group in self._groups.items() if name in self._owned and group in self._owned[name])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class LinearShards(LowRankLayer):
    """Wraps a ``nn.Linear`` or ``Conv1D``.

    Attributes:
        base_layer: The layer.
        shards_index_a: Adapter -> rows of the pool of the first factor, int32 (r * shards,).
        shards_index_b: Adapter -> those of the second.
        shards_factors: Adapter -> frozen factor of each rank, float32 (r,); only where a plan has them.
    """

    adapter_layer_names = ("shards_pool_a", "shards_pool_b")
    other_param_names = (
        "shards_index_a",
        "shards_index_b",
        "shards_factors",
        "shards_dropout",
        "shards_groups",
        "shards_places",
        "r",
        "scaling",
    )

    def __init__(self, base_layer: nn.Module, owner: Any) -> None:
        super().__init__(base_layer, owner)
        self.shards_groups: dict[str, str] = {}
        self.shards_places: dict[str, int] = {}
        self._laid_out: dict[str, tuple[Any, tuple[Tensor, Tensor]]] = {}
        self.shards_dropout = nn.ModuleDict({})
        self.shards_index_a, self.shards_index_b = BufferDict(persistent=True), BufferDict(persistent=True)
        self.shards_factors = BufferDict(persistent=True)

    @property
    def shards_pool_a(self) -> _Pools:
        """The pool of the first factor, by adapter: float32 (rows, a / shards)."""
        return _Pools(self.owner.shards_pool_a, self.shards_groups)

    @property
    def shards_pool_b(self) -> _Pools:
        """The pool of the second factor, by adapter: float32 (rows, b / shards)."""
        return _Pools(self.owner.shards_pool_b, self.shards_groups)

    def update_layer(
        self,
        adapter: str,
        group: str,
        place: int,
        index_a: Tensor,
        index_b: Tensor,
        *,
        factors: Tensor | None,
        alpha: float,
        dropout: float,
        inference_mode: bool,
    ) -> None:
        """Adds an adapter whose pools the tuner has made.

        Args:
            adapter: Its name.
            group: The group of layers that share the pools.
            place: The layer's number in it.
            index_a: Rows of the first factor's pool, int32 (r, shards).
            index_b: Rows of the second's.
            factors: Frozen factor of each rank, float32 (r,), or None.
            alpha: The update is multiplied by ``alpha / r``.
            dropout: Of the adapter's input.
            inference_mode: Whether nothing of it trains.
        """
        device = next(self.get_base_layer().parameters()).device
        self.shards_groups[adapter], self.shards_places[adapter] = group, place
        self.r[adapter], self.scaling[adapter] = index_a.shape[0], alpha / index_a.shape[0]
        self.shards_index_a[adapter], self.shards_index_b[adapter] = (
            index.reshape(-1).to(device) for index in (index_a, index_b)
        )
        if factors is not None:
            self.shards_factors[adapter] = factors.to(device)
        self.shards_dropout[adapter] = nn.Dropout(dropout) if dropout else nn.Identity()
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def factors(self, adapter: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns A (r, a) and B^T (r, b) of an adapter in ``dtype``: gathered as float32, cast once.

        In evaluation they are kept, as long as the pools stay what they were. Pools that train may be written in ways
        that leave no trace, through ``.data`` for one.
        """
        pools = self.shards_pool_a[adapter], self.shards_pool_b[adapter]
        if torch.is_grad_enabled() or any(pool.requires_grad for pool in pools):
            self._laid_out.clear()
            shared = self.owner.gathered(adapter, self.shards_groups[adapter], self.shards_places[adapter])
            if shared is None:
                return self._gather(adapter, dtype)
            device = self.shards_index_a[adapter].device
            return shared[0].to(device=device, dtype=dtype), shared[1].to(device=device, dtype=dtype)
        state = dtype, *((pool.data_ptr(), pool._version) for pool in pools)
        known = self._laid_out.get(adapter)
        if known is None or known[0] != state:
            known = self._laid_out[adapter] = state, self._gather(adapter, dtype)
        return known[1]

    def _gather(self, adapter: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        r = self.r[adapter]
        pairs = (
            (self.shards_index_a[adapter], self.shards_pool_a[adapter]),
            (self.shards_index_b[adapter], self.shards_pool_b[adapter]),
        )
        first, second = (
            F.embedding(index, pool).view(r, -1).to(device=index.device, dtype=dtype) for index, pool in pairs
        )
        return first, second

    def train(self, mode: bool = True) -> LinearShards:
        """Forgets the factors that were kept: what trains is about to change, or has changed."""
        self.forget()
        return super().train(mode)

    def forget(self) -> None:
        """Drops the factors that were kept."""
        self._laid_out.clear()

    def forward(self, x: Tensor, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Tensor:
        """Returns the base layer's output with the updates of the active adapters, or of each row's own adapter."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return y
        if adapter_names is not None:
            return self._mixed(x, y, adapter_names)
        for adapter in self.active_adapters:
            if adapter in self.r:
                y = y + self._update(adapter, x).to(y.dtype)
        return y

    def _mixed(self, x: Tensor, y: Tensor, adapter_names: Sequence[str]) -> Tensor:
        # Beams, several answers and flattened tokens multiply the rows, those of one row side by side.
        times, rest = divmod(len(x), len(adapter_names))
        if rest:
            raise ValueError(f"there are {len(adapter_names)} adapter_names for {len(x)} rows: one for each is needed")
        y = y.clone()
        for adapter in dict.fromkeys(adapter_names):
            if adapter in self.r:
                rows = [row for row in range(len(x)) if adapter_names[row // times] == adapter]
                y[rows] += self._update(adapter, x[rows]).to(y.dtype)
        return y

    def _update(self, adapter: str, x: Tensor) -> Tensor:
        """Returns ``s ((x A^T) * m) B^T``; the scale is applied to the narrow product."""
        self._refuse_nested_backward()
        dtype = product_dtype(x)
        first, second = self.factors(adapter, dtype)
        z = F.linear(self.shards_dropout[adapter](x).to(dtype), first) * self.scaling[adapter]
        if adapter in self.shards_factors:
            z = z * self.shards_factors[adapter].to(dtype)
        return z @ second

    @torch.no_grad()
    def plain_factors(self, adapter: str) -> tuple[Tensor, Tensor]:
        """Returns A (r, a), with the frozen factors in it, and B (b, r), float32."""
        first, second = self.factors(adapter, torch.float32)
        if adapter in self.shards_factors:
            first = first * self.shards_factors[adapter][:, None]
        return first, second.t()

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        # The pools are the tuner's, and other layers use them: they stay where they are.
        target = device or next(self.get_base_layer().parameters()).device
        for held in (self.shards_index_a, self.shards_index_b, self.shards_factors):
            if adapter_name in held and held[adapter_name].device != target:
                held[adapter_name] = held[adapter_name].to(target)


def unused_shards(layers: Iterable[LinearShards], adapter: str = "default") -> tuple[int, int]:
    """Returns how many rows of all pools no layer uses, and how many rows there are."""
    used: dict[int, set[int]] = {}
    rows: dict[int, int] = {}
    for layer in layers:
        pairs = ((layer.shards_pool_a, layer.shards_index_a), (layer.shards_pool_b, layer.shards_index_b))
        for pools, indices in pairs:
            key = id(pools[adapter])
            rows[key] = pools[adapter].shape[0]
            if not indices[adapter].is_meta:
                used.setdefault(key, set()).update(indices[adapter].tolist())
    return sum(rows[key] - len(own) for key, own in used.items()), sum(rows.values())
