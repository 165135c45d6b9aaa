"""Trains or freezes what patterns say."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from finetune.core.errors import CapabilityError, ConfigError, TargetError
from finetune.methods.base import FILE, MethodConfig
from finetune.methods.registry import register
from finetune.methods.whole_tensors import WholeTensors, WholeTensorsConfig

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from finetune.methods.primitives.trained_rows import TrainedRows
    from finetune.methods.primitives.unfrozen_list import RowRange

__all__ = ["Freeze", "FreezeConfig"]


class FreezeConfig(WholeTensorsConfig):
    """Which parameters train."""

    train: list[str] = Field(
        default=[],
        description="Patterns of what trains: parameters, modules, globs (model.layers.*.mlp), layers:8-15, re:REGEX, "
        "or kinds (attn, mlp, norm, embed, head, bias, router, experts); NAME[a:b] are rows of one. Empty: all.",
    )
    freeze: list[str] = Field(default=[], description="Patterns of what does not, whatever train says.")
    unfrozen_parameters: str | None = Field(
        default=None,
        description="YAML file with a list unfrozen_parameters, as other trainers take it, of what trains too.",
        json_schema_extra=FILE,
    )


@register("freeze")
class Freeze(WholeTensors):
    """Trains the parameters that patterns name, whole or some of their rows, and freezes the others.

    Rows (``model.embed_tokens.weight[49152:]``) are a float32 parameter of their own: those outside stay bit-identical,
    under weight decay and momentum too. Lists for other trainers are read as regular expressions from the start of a
    name, in which a dot is a dot unless a plus follows it.
    """

    Config: ClassVar[type[MethodConfig]] = FreezeConfig
    config: FreezeConfig

    def choose(self, model: nn.Module, candidates: frozenset[str]) -> Sequence[str]:
        """Returns the parameters of which all trains."""
        self._resolve(model, candidates)
        return self._whole

    def narrow(self, model: nn.Module, candidates: frozenset[str]) -> frozenset[str]:
        """Returns what a later method may choose from.

        Raises:
            CapabilityError: Only rows of a parameter train, which a later method cannot be held to.
        """
        narrowed = super().narrow(model, candidates)
        if self._ranges:
            raise CapabilityError(
                "a later method cannot be held to rows of a parameter",
                where="method.train",
                got=", ".join(self._ranges),
                fix="freeze alone, or whole parameters",
            )
        return narrowed

    def _resolve(self, model: nn.Module, candidates: frozenset[str]) -> None:
        """Finds out what trains whole, of what some rows train, and how much each pattern meant."""
        from finetune.methods.primitives.parameter_patterns import match_parameters
        from finetune.methods.primitives.unfrozen_list import rows_of

        parameters = {name: p for name, p in model.named_parameters() if name in candidates}
        trained = self._trained_by_pattern(model, parameters)
        frozen = match_parameters(model, parameters, self.config.freeze, "method.freeze")
        left_out = frozenset().union(*frozen.values())
        whole = {name for names, span in trained.values() if span is None for name in names} - left_out
        self._whole = [name for name in parameters if name in whole]
        self._ranges: dict[str, set[int]] = {}
        for pattern, (names, span) in trained.items():
            for name in () if span is None else names:
                if name not in whole | left_out:
                    assert span is not None
                    rows = rows_of(span, name, parameters[name].shape[0], pattern)
                    self._ranges.setdefault(name, set()).update(rows)
        self._counts = [f"{pattern}: {len(names)}" for pattern, (names, _) in trained.items()]
        self._counts += [f"not {pattern}: {len(names)}" for pattern, names in frozen.items()]
        if not whole and not self._ranges:
            counts = "; ".join(self._counts)
            raise TargetError("everything is frozen", where="method.freeze", got=counts, fix="fewer patterns in freeze")
        packed = [name for name in (*whole, *self._ranges) if not parameters[name].is_floating_point()]
        if packed:
            raise TargetError("quantised parameters cannot train", where=", ".join(sorted(packed)[:4]))

    def _trained_by_pattern(
        self, model: nn.Module, parameters: Collection[str]
    ) -> dict[str, tuple[tuple[str, ...], RowRange | None]]:
        """Returns by pattern the parameters that it means, and which rows of them; None: all."""
        from finetune.methods.primitives.parameter_patterns import all_names, match_parameters
        from finetune.methods.primitives.unfrozen_list import match_unfrozen, read_unfrozen, split_rows

        config, listing = self.config, self.config.unfrozen_parameters
        if not (config.train or config.freeze or listing):
            raise ConfigError(
                "freeze says neither what trains nor what does not",
                where="method",
                want="train, freeze or unfrozen_parameters",
                fix="method.train: [attn], or method.name: full",
            )
        if in_part := [pattern for pattern in config.freeze if split_rows(pattern)[1] is not None]:
            raise ConfigError(
                "rows are frozen by training the others",
                where="method.freeze",
                got=", ".join(in_part),
                fix="method.train: [NAME[a:b]] with the rows that are to train",
            )
        trained = {}
        for pattern in config.train:
            plain, span = split_rows(pattern)
            trained[pattern] = (match_parameters(model, parameters, [plain], "method.train")[plain], span)
        if listing is not None:
            aliases = {name: own for name, own in all_names(model).items() if name in parameters}
            trained |= match_unfrozen(read_unfrozen(listing), aliases, listing)
        return trained or {"everything": (tuple(parameters), None)}

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        import torch

        from finetune.methods.primitives.routed_parameter import holders_of
        from finetune.methods.primitives.step_sync import after_optimizer_step
        from finetune.methods.primitives.trained_rows import TrainedRows

        super()._attach(model, candidates)
        holders = holders_of(model)
        self._rows: dict[str, TrainedRows] = {
            name: TrainedRows(name, holders[id(model.get_parameter(name))], index=torch.tensor(sorted(rows)))
            for name, rows in self._ranges.items()
        }
        self._sync = after_optimizer_step(self._row_values, self._write_rows)
        return model

    def _row_values(self) -> list[nn.Parameter]:
        return [rows.values for rows in self._rows.values()]

    def _write_rows(self, optimizer: Optimizer) -> None:
        for rows in self._rows.values():
            rows.write()

    def _take_down(self) -> None:
        self._sync.remove()
        for rows in self._rows.values():
            rows.remove()
        super()._take_down()

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns name and shape of each tensor that trains whole or in part."""
        return {name: tuple(self.model.get_parameter(name).shape) for name in (*self._tensors, *self._rows)}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns ``NAME.value`` per trained tensor, and ``NAME.{index, value, base}`` where some rows train."""
        from finetune.methods.primitives.trained_rows import rows_state

        return {**super().state_dict(), **rows_state(self._rows)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copies the values into the trained tensors and rows; strict."""
        from finetune.methods.primitives.trained_rows import load_rows

        of_rows = {key: tensor for key, tensor in state.items() if key.rpartition(".")[0] in self._rows}
        load_rows(self._rows, of_rows)
        super().load_state_dict({key: tensor for key, tensor in state.items() if key not in of_rows})

    def _axes(self) -> dict[str, int]:
        return {name: rows.axis for name, rows in self._rows.items()}

    def _notes(self) -> tuple[str, ...]:
        rows = [f"{len(own)} rows of {name}" for name, own in self._ranges.items()]
        shown = self._counts if len(self._counts) <= 8 else [*self._counts[:8], f"{len(self._counts) - 8} more"]
        return (*rows, f"parameters by pattern: {'; '.join(shown)}", *super()._notes())
