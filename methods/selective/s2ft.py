"""S2FT: trains whole attention heads and feed-forward channels of a model's own weights, in place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from finetune.core.errors import CheckpointError, FinetuneWarning, TargetError
from finetune.core.learned_state import (
    narrowest_exact,
    read_learned_state,
    require_same_method,
    require_same_shapes,
    write_learned_state,
)
from finetune.methods.base import Kind, Method, MethodConfig
from finetune.methods.registry import register

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from finetune.methods.primitives.column_slice import ColumnSlice

__all__ = ["S2FT", "S2FTConfig"]


class S2FTConfig(MethodConfig):
    """What S2FT trains. A ratio is a share in [0, 1]."""

    ratio: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="Share of the block linears' weights that trains, half of it heads and half of it channels.",
    )
    o_ratio: float | None = Field(
        default=None, ge=0, le=1, description="Share of all attention heads whose o_proj columns train; null: by ratio."
    )
    down_ratio: float | None = Field(
        default=None, ge=0, le=1, description="Share of all channels whose down_proj columns train; null: by ratio."
    )
    select: Literal["random", "weight"] = Field(
        default="random", description="Score of a head or channel: random, or the norm of its columns."
    )
    pick: Literal["largest", "smallest"] = Field(
        default="smallest", description="Which end of the scores to take; without effect for random."
    )
    seed: int = Field(default=0, description="Seed of the random selection and of the rounding over layers.")


@register("s2ft")
class S2FT(Method):
    """Trains a few attention heads and feed-forward channels in place: structured, and as small as an adapter.

    The columns of ``o_proj`` that belong to chosen query heads and the columns of ``down_proj`` that belong to chosen
    channels train as one dense float32 slice per layer; everything else stays bit-identical. ``W[:, S] <- W[:, S] -
    optimizer(dL/dW[:, S])``, where the backward forms only that slice of the gradient and keeps only that slice of the
    layer's input. Memory per trained parameter: 4 bytes value, 4 gradient, 8 Adam, and the base's value. Saved: index,
    value and base value of each slice. The update has the rank of the slice, so it exports exactly as a LoRA adapter.

    Differences from the authors' code: every query head may be chosen under GQA (nothing is permuted), the number of
    trained columns is exact (rounding is spread over layers), slices have a float32 master, any input rank works.

    References:
        Yang et al., "S2FT: Efficient, Scalable and Generalizable LLM Fine-tuning by Structured Sparsity",
        arXiv 2412.06289, sections 3.1-3.3.
    """

    paper: ClassVar[str] = "arXiv 2412.06289"
    kind: ClassVar[Kind] = "delta"
    Config: ClassVar[type[MethodConfig]] = S2FTConfig
    config: S2FTConfig

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        import torch

        from finetune.methods.primitives.column_slice import slice_columns
        from finetune.methods.primitives.step_sync import after_optimizer_step

        generator = torch.Generator().manual_seed(self.config.seed)
        self._slices: dict[str, ColumnSlice] = {}
        for names, width, share in self._groups(model, candidates):
            layers = {name: model.get_submodule(name) for name in names}
            for name, units in self._choose(layers, width, share, generator).items():
                if units.numel():
                    columns = (units[:, None] * width + torch.arange(width)).reshape(-1)
                    self._slices[name] = slice_columns(layers[name], columns)
        self._sync = after_optimizer_step([layer.columns for layer in self._slices.values()], self._write)
        return model

    def _groups(self, model: nn.Module, candidates: frozenset[str]) -> list[tuple[list[str], int, float]]:
        """Returns for attention and feed-forward: the layers' names, the columns of a unit, the share to train."""
        from finetune.methods.primitives.projections import find_output_projections, in_features

        found = find_output_projections(model)
        attention = [name for name in found.attention if f"{name}.weight" in candidates]
        feed_forward = [name for name in found.feed_forward if f"{name}.weight" in candidates]
        self._check_layers(model, "o_ratio", attention, self.config.o_ratio)
        self._check_layers(model, "down_ratio", feed_forward, self.config.down_ratio)
        sizes = [sum(_weight_size(model, name) for name in names) for names in (attention, feed_forward)]
        even = self.config.ratio * _block_linear_size(model, candidates) / 2
        o_share, down_share = (
            given if given is not None else min(1.0, even / size)
            for given, size in zip((self.config.o_ratio, self.config.down_ratio), sizes, strict=True)
        )
        heads: int = model.config.get_text_config().num_attention_heads  # type: ignore[union-attr, operator]
        head_dim = in_features(model.get_submodule(attention[0])) // heads if attention else 1
        return [(attention, head_dim, o_share), (feed_forward, 1, down_share)]

    def _check_layers(self, model: nn.Module, key: str, names: list[str], share: float | None) -> None:
        from finetune.methods.primitives.column_slice import can_slice

        if share == 0:
            names.clear()
            return
        wanted = "nn.Linear or Conv1D output projections of attention and feed-forward, one per block"
        if not names:
            linears = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if can_slice(module)})
            raise TargetError(
                f"s2ft finds no layer for {key} in {type(model).__name__}",
                want=wanted,
                got=", ".join(linears),
                fix=f"method.{key}: 0 to train the other half only, or another method (finetune ls methods)",
            )
        for name in names:
            if not can_slice(model.get_submodule(name)):
                layer = type(model.get_submodule(name)).__name__
                raise TargetError(
                    f"s2ft cannot slice a {layer}", where=name, want=wanted, fix="an unquantised base model"
                )

    def _choose(
        self, layers: dict[str, nn.Module], width: int, share: float, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Returns the chosen units of each layer, ascending; their total is exact, layers differ by at most one."""
        import torch

        from finetune.methods.primitives.column_slice import oriented_weight
        from finetune.methods.primitives.projections import in_features

        counts = [in_features(layer) // width for layer in layers.values()]
        wanted = [share * count for count in counts]
        quotas = [int(number) for number in wanted]
        total = min(sum(counts), max(1, round(sum(wanted)))) if share > 0 else 0
        spare = torch.randperm(len(layers), generator=generator).tolist()
        for position in spare[: max(0, total - sum(quotas))]:
            quotas[position] += 1
        self._warn_if_empty(quotas, width)
        chosen = {}
        for (name, layer), count, quota in zip(layers.items(), counts, quotas, strict=True):
            # On the meta device there are no values to score: a dry run needs the counts only.
            if self.config.select == "random" or layer.weight.is_meta:
                units = torch.randperm(count, generator=generator)[:quota]
            else:
                norms = oriented_weight(layer).detach().float().square().sum(0).reshape(count, width).sum(1)
                units = norms.argsort(descending=self.config.pick == "largest", stable=True)[:quota].cpu()
            chosen[name] = units.sort().values
        return chosen

    def _warn_if_empty(self, quotas: list[int], width: int) -> None:
        import warnings

        empty, unit = quotas.count(0), "attention head" if width > 1 else "channel"
        if quotas and empty:
            warnings.warn(
                f"s2ft trains no {unit} in {empty} of {len(quotas)} layers: the ratio is below one {unit} per layer, "
                "so these layers learn through the others only",
                FinetuneWarning,
                stacklevel=2,
            )

    def _write(self, optimizer: Optimizer) -> None:
        for layer in self._slices.values():
            layer.write()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns per layer ``NAME.weight.{index, value, base}``: int32 (K,), float32 (M, K), base dtype (M, K)."""
        import torch

        state = {}
        for name, layer in self._slices.items():
            state[f"{name}.weight.index"] = layer.column_index.to(torch.int32)
            state[f"{name}.weight.value"] = layer.columns.detach()
            state[f"{name}.weight.base"] = narrowest_exact(layer.column_base)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Trains the columns of ``state`` instead of those chosen at :meth:`attach`; strict."""
        import torch

        require_same_shapes(self.state_dict(), state)
        for name, layer in self._slices.items():
            index, value, base = (state[f"{name}.weight.{part}"] for part in ("index", "value", "base"))
            device = layer.weight.device
            layer.select(index.to(device, torch.int64), value.to(device))
            if not torch.equal(layer.column_base, base.to(layer.column_base)):
                raise CheckpointError(
                    "the learned state belongs to another base model", where=name, fix="load the base it was trained on"
                )

    def save(self, folder: str | Path) -> None:
        """Writes the slices with their base values, and the metadata."""
        axes = {f"{name}.weight": layer.column_axis for name, layer in self._slices.items()}
        write_learned_state(Path(folder), self.state_dict(), {**self.metadata(), "axes": axes})

    def load(self, folder: str | Path) -> None:
        """Reads what :meth:`save` wrote; strict."""
        state, metadata = read_learned_state(Path(folder))
        require_same_method(self.metadata(), metadata, Path(folder))
        self.load_state_dict(state)

    def merge(self) -> nn.Module:
        """Makes the sliced layers plain again; their weights hold the trained columns already."""
        from finetune.methods.primitives.column_slice import unslice_columns

        self._sync.remove()
        for layer in self._slices.values():
            unslice_columns(layer)
        model, self._model, self._slices = self.model, None, {}
        return model

    def export_lora(self, folder: str | Path) -> None:
        """Writes the update as a stock PEFT LoRA adapter: A selects the columns, B holds their change (M x K).

        Exact: ``W + B A`` equals the tuned weight, since the update is zero outside the columns.
        """
        import torch.nn.functional as F

        from finetune.methods.primitives.lora_form import LowRankUpdate, write_lora
        from finetune.methods.primitives.projections import in_features

        updates = {}
        for name, layer in self._slices.items():
            change = layer.columns.detach().to(layer.column_base.dtype).float() - layer.column_base.float()
            selector = F.one_hot(layer.column_index, in_features(layer)).to(change)
            updates[name] = LowRankUpdate(selector, change, transposed=layer.column_axis == 0)
        write_lora(Path(folder), updates, base_model=str(self.metadata()["base_model"]))

    def _chosen(self) -> tuple[str, ...]:
        lines: dict[str, list[int]] = {}
        for name, layer in self._slices.items():
            lines.setdefault(name.rpartition(".")[2], []).append(layer.column_index.numel())
        return tuple(
            f"{sum(columns)} columns of {len(columns)} {kind} layers ({min(columns)} to {max(columns)} each, "
            f"{self.config.select})"
            for kind, columns in lines.items()
        )


def _weight_size(model: nn.Module, name: str) -> int:
    return int(model.get_parameter(f"{name}.weight").numel())


def _block_linear_size(model: nn.Module, candidates: frozenset[str]) -> int:
    """Returns the number of matrix entries inside the blocks: all candidate matrices but embeddings and head."""
    outside = {id(layer.weight) for layer in _embeddings(model)}
    return sum(
        p.numel() for name, p in model.named_parameters() if p.ndim > 1 and name in candidates and id(p) not in outside
    )


def _embeddings(model: Any) -> list[Any]:
    from torch import nn

    head = model.get_output_embeddings()
    return [module for module in model.modules() if isinstance(module, nn.Embedding)] + ([head] if head else [])
