"""The PEFT tuner of pools that layers share; its plans are MoS's, PRoLoRA's and that of pure sharing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import Tensor, nn

from finetune.core.errors import TargetError
from finetune.methods.primitives.carried import Carried
from finetune.methods.primitives.low_rank_layer import product_dtype
from finetune.methods.primitives.peft_registration import register_tuner
from finetune.methods.primitives.projections import in_features, out_features
from finetune.methods.primitives.shard_layer import LinearShards
from finetune.methods.primitives.shard_plans import ShardPlan, cyclic_plan, sampled_plan, shared_plan
from finetune.methods.primitives.tuner_targets import targeted_layers

__all__ = ["ShardsConfig", "ShardsTuner"]


@dataclass
class ShardsConfig(PeftConfig):
    """Settings of a tuner whose factors are gathered from shared pools.

    Attributes:
        sharing: ``mos``, ``prolora`` or ``pure``: what the other fields mean depends on it.
        r: Rank of each layer's update.
        equiv_rank: Rank of the plain LoRA with as many parameters.
        private_rank: Vectors of each layer that no other layer uses.
        num_shards: Shards per vector; divides both widths of each layer.
        dealing: ``balanced`` or ``random``: how public shards are dealt to the layers.
        dissociated: Whether the two factors are dealt apart.
        subset: Whether each layer takes a choice of its own.
        unshared_rank: Vectors that repeat nothing (PRoLoRA).
        num_shards_b: Shards per vector of the second factor (PRoLoRA); None: as many as of the first.
        random_scaling: Standard deviation of frozen factors of each rank and layer around one; None: there are none.
        gather: ``layer`` or ``model``: whether training lays the factors out layer by layer, or those of all layers
            of a group at once when a pass begins, which takes fewer kernels and holds them all.
        alpha: The update is multiplied by ``alpha / r``.
        dropout: Of the adapter's input.
        seed: Of the dealing and of the pools.
        target_modules: As PEFT's.
        exclude_modules: As PEFT's.
        modules_to_save: As PEFT's.
        layers_to_transform: As PEFT's.
        layers_pattern: As PEFT's.
    """

    sharing: str = "mos"
    r: int = 16
    equiv_rank: int = 8
    private_rank: int = 2
    num_shards: int = 4
    dealing: str = "balanced"
    dissociated: bool = True
    subset: bool = True
    unshared_rank: int = 0
    num_shards_b: int | None = None
    random_scaling: float | None = None
    gather: str = "model"
    alpha: float = 16
    dropout: float = 0.0
    seed: int = 0
    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type = SHARDS
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, set(getattr(self, name)))


@dataclass
class _Group:
    """Layers that share a pool: those of one name and shape.

    Attributes:
        name: Without dots, for the keys of saved files.
        a: Input width.
        b: Output width.
        layers: Names of the layers, in the model's order.
    """

    name: str
    a: int
    b: int
    layers: list[str] = field(default_factory=list)


Plans = tuple[ShardPlan, ShardPlan]


def _mos(config: ShardsConfig, group: _Group) -> Plans:
    count, vectors = len(group.layers), config.r - config.private_rank
    public = (config.equiv_rank - config.private_rank) * count
    if vectors > public:
        raise TargetError(
            f"the {count} layers {group.name} share too few vectors for this rank",
            where="method.r",
            got=f"r - private_rank = {vectors} for each layer",
            want=f"at most (equiv_rank - private_rank) * {count} = {public}, since none takes a vector twice",
            fix="a smaller r, or a larger equiv_rank",
        )
    settings: dict[str, Any] = {
        "budget": config.equiv_rank,
        "private": config.private_rank,
        "shards": config.num_shards,
        "dealing": config.dealing,
        "seed": config.seed,
    }
    first = sampled_plan(count, config.r, stream=f"{group.name} A", **settings)
    if not config.dissociated:
        return first, first
    return first, sampled_plan(count, config.r, stream=f"{group.name} B", **settings)


def _pure(config: ShardsConfig, group: _Group) -> Plans:
    count = len(group.layers)
    rows = count * config.equiv_rank
    rank, seed = (config.r, config.seed) if config.subset else (rows, None)
    if rank > rows:
        raise TargetError(
            f"the {count} layers {group.name} share too few vectors for this rank",
            where="method.r",
            got=f"{rank} for each layer",
            want=f"at most equiv_rank * {count} = {rows}",
            fix="a smaller r, or a larger equiv_rank",
        )
    plan = shared_plan(count, rank, rows=rows, seed=seed, stream=group.name)
    return plan, plan


def _prolora(config: ShardsConfig, group: _Group) -> Plans:
    count, unshared = len(group.layers), config.unshared_rank
    second = config.num_shards if config.num_shards_b is None else config.num_shards_b
    return (
        cyclic_plan(count, config.r, unshared=unshared, shards=config.num_shards),
        cyclic_plan(count, config.r, unshared=unshared, shards=second),
    )


_PLANS: dict[str, Callable[[ShardsConfig, _Group], Plans]] = {"mos": _mos, "prolora": _prolora, "pure": _pure}


_GATHERED: Carried[dict[tuple[str, str], list[tuple[Tensor, Tensor]]]] = Carried("gathered")


class ShardsTuner(BaseTuner):
    """Owns the pools, by adapter and group, so that wrappers and state dicts see each once; layers refer to them."""

    prefix: str = "shards_"
    tuner_layer_cls = LinearShards
    target_module_mapping: Any = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    uses_shared_state = True

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, Tensor] | None = None,
    ) -> None:
        """Plans the groups, makes their pools, then lets PEFT replace the layers."""
        if adapter_name in self.prefix:
            raise ValueError(f"{adapter_name!r} is no name for an adapter: it is a part of {self.prefix!r}")
        if "shards_pool_a" not in self._modules:
            self.shards_pool_a, self.shards_pool_b = nn.ModuleDict({}), nn.ModuleDict({})
            self._places: dict[str, dict[str, tuple[str, int, Tensor, Tensor, Tensor | None]]] = {}
            self.seen_outside_backward = False
        config: Any = self._prepare_adapter_config(self.peft_config[adapter_name], self.get_model_config(model))
        self._make_pools(adapter_name, config, self._groups(model, config), on_meta=low_cpu_mem_usage)
        try:
            super().inject_adapter(
                model,
                adapter_name,
                autocast_adapter_dtype=autocast_adapter_dtype,
                low_cpu_mem_usage=low_cpu_mem_usage,
                state_dict=state_dict,
            )
        except Exception:
            del self.shards_pool_a[adapter_name], self.shards_pool_b[adapter_name]
            raise
        finally:
            del self._places[adapter_name]

    def _groups(self, model: nn.Module, config: Any) -> list[_Group]:
        """Returns the groups of the layers that the config targets, as PEFT will find them."""
        groups: dict[str, _Group] = {}
        for name, layer in targeted_layers(self, model, config).items():
            a, b = in_features(layer), out_features(layer)
            key = f"{name.rpartition('.')[2]}_{a}x{b}"
            groups.setdefault(key, _Group(key, a, b)).layers.append(name)
        return list(groups.values())

    def _make_pools(self, adapter: str, config: ShardsConfig, groups: list[_Group], *, on_meta: bool) -> None:
        generator, device = torch.Generator().manual_seed(config.seed), next(self.model.parameters()).device
        pools: tuple[nn.ParameterDict, nn.ParameterDict] = (nn.ParameterDict({}), nn.ParameterDict({}))
        self._places[adapter] = {}
        for group in groups:
            plans = _PLANS[config.sharing](config, group)
            for pool, plan, width, is_first in zip(pools, plans, (group.a, group.b), (True, False), strict=True):
                if width % plan.shards:
                    raise TargetError(
                        f"{plan.shards} shards do not divide the width {width} of {group.layers[0]}",
                        where="method.num_shards" if is_first or config.num_shards_b is None else "method.num_shards_b",
                        want=f"a divisor of {width}",
                    )
                rows = torch.zeros(plan.rows, width // plan.shards, device="meta" if on_meta else "cpu")
                if is_first and not on_meta:
                    # The bound of a whole vector, as in the reference: a shard is not wider for being short.
                    rows.uniform_(-1 / math.sqrt(group.a), 1 / math.sqrt(group.a), generator=generator)
                pool[group.name] = nn.Parameter(rows if on_meta else rows.to(device))
            factors = None
            if config.random_scaling is not None:
                shape = (len(group.layers), plans[0].index.shape[1])
                factors = 1 + config.random_scaling * torch.randn(shape, generator=generator)
            for number, name in enumerate(group.layers):
                own = None if factors is None else factors[number].clone()
                self._places[adapter][name] = (group.name, number, plans[0].index[number], plans[1].index[number], own)
        self.shards_pool_a[adapter], self.shards_pool_b[adapter] = pools

    def _create_and_replace(  # type: ignore[override]
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **kwargs: Any,
    ) -> None:
        layer = target if isinstance(target, LinearShards) else LinearShards(target, self)
        group, place, first, second, factors = self._places[adapter_name][current_key]
        layer.update_layer(
            adapter_name,
            group,
            place,
            first,
            second,
            factors=factors,
            alpha=peft_config.alpha,
            dropout=peft_config.dropout,
            inference_mode=peft_config.inference_mode or adapter_name not in self.active_adapters,
        )
        if layer is not target:
            self._replace_module(parent, target_name, layer, target)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        owned: Any = (self.shards_pool_a, self.shards_pool_b)
        for pools in (pools_of[adapter_name] for pools_of in owned):
            for group, pool in pools.items():
                if autocast_adapter_dtype and pool.dtype in (torch.float16, torch.bfloat16):
                    pools[group] = nn.Parameter(pool.float(), requires_grad=pool.requires_grad)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        self.seen_outside_backward = False
        whole = [name for name in self.active_adapters if cast(Any, self.peft_config[name]).gather == "model"]
        # A compiler fuses the small kernels itself, and could not see through what is carried.
        if not (whole and self.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        with _GATHERED.during(self.model, self._gather(whole)):
            return super().forward(*args, **kwargs)

    def _gather(self, adapters: Sequence[str]) -> dict[tuple[str, str], list[tuple[Tensor, Tensor]]]:
        """Returns by adapter and group the factors of its layers, in their order."""
        layers = [layer for layer in self.modules() if isinstance(layer, LinearShards)]
        found = {}
        for adapter in adapters:
            for group in cast(nn.ParameterDict, self.shards_pool_a[adapter]):
                own = [layer for layer in layers if layer.shards_groups.get(adapter) == group]
                found[adapter, group] = _gather_group(own, adapter)
        return found

    def gathered(self, adapter: str, group: str, place: int) -> tuple[Tensor, Tensor] | None:
        """Returns what was laid out for a layer when the pass began, or None where each layer does that for itself.

        Reentrant recomputation goes through the graph of each part by itself, so there is none to share.
        """
        every = {} if torch.compiler.is_compiling() else _GATHERED.get() or {}
        if (adapter, group) not in every:
            return None
        factors = every[adapter, group][place]
        if factors[0].requires_grad and not torch.is_grad_enabled():
            every.clear()
            return None
        return factors

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Lets each row of a batch have its own adapter: PEFT hands their names over here."""
        names = kwargs.pop("adapter_names", None)
        if names is None:
            yield
            return
        if self.training:
            raise ValueError("rows have adapters of their own in evaluation only: model.eval()")
        unknown = sorted(set(names) - {*self.peft_config, "__base__"})
        if unknown:
            raise ValueError(f"there are no adapters {', '.join(unknown)}")
        if any(layer.merged for layer in self.modules() if isinstance(layer, LinearShards)):
            raise ValueError("an adapter is merged into the weights of all rows: unmerge_adapter() first")

        def hand_over(layer: nn.Module, given: Any, named: dict[str, Any]) -> Any:
            return given, {**named, "adapter_names": names}

        layers = [layer for layer in self.modules() if isinstance(layer, LinearShards)]
        handles = [layer.register_forward_pre_hook(hand_over, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _gather_group(layers: list[LinearShards], adapter: str) -> list[tuple[Tensor, Tensor]]:
    """Returns A (r, a) and B^T (r, b) of each layer of a group, from one lookup for each factor."""
    r = layers[0].r[adapter]
    pairs = (
        (layers[0].shards_pool_a[adapter], [layer.shards_index_a[adapter] for layer in layers]),
        (layers[0].shards_pool_b[adapter], [layer.shards_index_b[adapter] for layer in layers]),
    )
    dtype = product_dtype(cast(Tensor, layers[0].get_base_layer().weight))
    # Unbound, the gradients of all layers are put together in one go; indexing would write each among zeros.
    first, second = (
        F.embedding(torch.stack([index.to(pool.device) for index in indices]), pool)
        .view(len(layers), r, -1)
        .to(dtype)
        .unbind()
        for pool, indices in pairs
    )
    return list(zip(first, second, strict=True))


SHARDS = register_tuner("shards", ShardsConfig, ShardsTuner)
