"""Base of the methods that train chosen entries of the base model's own weights, in place."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from finetune.core.errors import TargetError
from finetune.methods.amounts import Amount
from finetune.methods.base import Kind, MethodConfig
from finetune.methods.in_place import InPlace

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from finetune.methods.primitives.entry_pool import EntryPool, Observer

__all__ = ["Scope", "SelectedEntries", "SelectedEntriesConfig"]


class Scope(MethodConfig):
    """Which parameters entries are chosen from."""

    include: list[str] | None = Field(
        default=None,
        description="Regular expressions; a parameter whose name contains a match is in the scope. null: every matrix "
        "but embeddings and output head, or every matrix that an earlier method left trainable.",
    )
    exclude: list[str] = Field(default=[], description="Regular expressions of parameters to leave out.")


class SelectedEntriesConfig(MethodConfig):
    """What all methods that choose entries share."""

    budget: Amount = Field(
        default=0.01, description="Entries that train: a share of the scope (0.01) or their number (100000)."
    )
    scope: Scope = Field(default=Scope(), description="Which parameters entries are chosen from.")
    weight_decay_target: Literal["zero", "base"] = Field(
        default="zero", description="What weight decay pulls the chosen entries towards: zero, or their base values."
    )
    backend: Literal["auto", "dense", "sampled", "gather"] = Field(
        default="auto",
        description="How the gradient of chosen entries is computed: the whole product, sampled products, or one "
        "product per entry; auto: the fastest here, measured at the start.",
    )


class SelectedEntries(InPlace):
    """Trains single entries of weights, chosen by :meth:`choose`, in place.

    The chosen entries are one float32 parameter; everything else stays bit-identical, under weight decay and in 16-bit
    weights too. Memory per entry: 4 bytes value, 4 gradient, 8 Adam, 8 index, the base's value, and up to 20 for the
    way that its gradient is computed; no dense gradient outlives its layer's backward pass. Saved: index, value and
    base value of each entry.
    """

    kind: ClassVar[Kind] = "delta"
    narrows_added: ClassVar[bool] = True
    Config: ClassVar[type[MethodConfig]] = SelectedEntriesConfig
    config: SelectedEntriesConfig

    @abstractmethod
    def choose(self, scope: dict[str, nn.Parameter], budget: int) -> dict[str, Tensor]:
        """Returns what trains at the start: tensor name -> distinct flat positions, int64, in all ``budget``."""

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        from finetune.methods.primitives.entry_pool import EntryPool
        from finetune.methods.primitives.entry_scope import resolve_scope
        from finetune.methods.primitives.step_sync import after_optimizer_step

        section = self.config.scope
        scope = resolve_scope(model, candidates, include=section.include, exclude=section.exclude)
        budget = self._budget(sum(weight.numel() for weight in scope.values()))
        choice = self._first_choice(scope, budget)
        self._pool: EntryPool = EntryPool(
            model,
            scope,
            budget,
            to_base=self.config.weight_decay_target == "base",
            backend=self.config.backend,
            observer=self._observer(),
        )
        self._pool.choose(choice)
        # What an adapter added is restored by the adapter's own state.
        self._over_adapter = hasattr(model, "active_peft_config")
        self._sync = after_optimizer_step([self._pool.values], self._after_step)
        return model

    def _budget(self, size: int) -> int:
        budget = self.config.budget
        count = budget if isinstance(budget, int) else max(1, round(budget * size))
        if count > size:
            raise TargetError(
                "the budget is larger than the scope",
                where="method.budget",
                got=f"{count:,}",
                want=f"at most {size:,}, or a share up to 1.0",
            )
        return count

    def _first_choice(self, scope: dict[str, nn.Parameter], budget: int) -> dict[str, Tensor]:
        weightless = any(weight.is_meta for weight in scope.values())
        if weightless or (self.calibration_examples(1) and self._calibration is None):
            import torch

            from finetune.methods.primitives.entry_choice import even_quotas

            # A stand-in of the right size: there are no values to choose by, or a learned state follows.
            quotas = even_quotas({name: weight.numel() for name, weight in scope.items()}, budget)
            return {name: torch.arange(count) for name, count in quotas.items()}
        return self.choose(scope, budget)

    def _observer(self) -> Observer | None:
        """Returns what chooses while training; None where the choice is made once."""
        return None

    def _after_step(self, optimizer: Optimizer) -> None:
        self._pool.write()

    def write_values(self) -> None:
        """Rounds the values of the chosen entries into the weights."""
        self._pool.write()

    def touched(self) -> frozenset[str]:
        """Returns the names of the parameters in the scope."""
        return frozenset(self._pool.tensors)

    def saved_scalars(self) -> int:
        """Returns the number of entries that are chosen."""
        return self._pool.chosen

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns name and shape of each tensor in the scope: its layer keeps its input for the backward pass."""
        return {name: tuple(entries.weight.shape) for name, entries in self._pool.tensors.items()}

    def averages(self) -> frozenset[str]:
        """Returns the entries' name where FSDP2 has sharded the model whose weights they belong to."""
        from torch.distributed.fsdp import FSDPModule

        from finetune.methods.primitives.entry_pool import PARAMETER

        return frozenset({PARAMETER}) if isinstance(self.model, FSDPModule) else frozenset()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns per tensor with chosen entries ``NAME.{index, value, base}``, and what resuming needs besides."""
        from finetune.methods.primitives.entry_state import pool_state

        return pool_state(self._pool)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Trains the entries of ``state`` instead of those chosen before; strict."""
        from finetune.methods.primitives.entry_state import load_pool_state

        load_pool_state(self._pool, state, over_adapter=self._over_adapter)

    def _axes(self) -> dict[str, None]:
        return dict.fromkeys(self._pool.tensors)

    def export_adapter(self, folder: str | Path) -> None:
        """Writes the update as a stock PEFT SHiRA adapter: the entries and their changes."""
        from finetune.methods.primitives.stock_adapter import WeightChange, write_stock_adapter

        changes = {}
        for name, entries in self._pool.tensors.items():
            if entries.index.numel():
                change = self._pool.absolute(entries).to(entries.base.dtype).float() - entries.base.float()
                changes[name] = WeightChange(None, entries.index, change)
        write_stock_adapter(Path(folder), changes, self.model, base_model=str(self.metadata()["base_model"]))

    def merge(self) -> nn.Module:
        """Makes the modules plain again; their weights hold the trained entries already."""
        self._sync.remove()
        self._pool.detach()
        model, self._model = self.model, None
        del self._pool
        return model

    def _chosen(self) -> tuple[str, ...]:
        tensors = self._pool.tensors.values()
        size = sum(entries.weight.numel() for entries in tensors)
        counts: dict[str, int] = {}
        for entries in tensors:
            kind = entries.name.removesuffix(".weight").rpartition(".")[2]
            counts[kind] = counts.get(kind, 0) + entries.index.numel()
        parts = ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
        return (
            f"{self._pool.values.numel():,} of {size:,} entries in {len(tensors)} tensors",
            f"chosen now: {parts}",
            f"gradient of entries by {', '.join(sorted({entries.backend for entries in tensors}))}",
        )
