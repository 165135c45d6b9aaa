"""Several methods in order: a later one chooses among what the earlier ones left trainable."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.errors import CapabilityError
from finetune.methods.base import CHOSEN_BEFORE, Kind, Method, MethodSummary
from finetune.methods.in_place import InPlace
from finetune.methods.scheduled_entries import ScheduledEntries
from finetune.methods.selected_entries import SelectedEntries
from finetune.methods.whole_tensors import WholeTensors

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import TrainerCallback, TrainingArguments

__all__ = ["Composition"]


class Composition(Method):
    """Methods that narrow one after the other what trains; the last one trains.

    An earlier method that trains whole tensors only names them: nothing of it is attached. An earlier one that adds
    parameters is attached, and a later one chooses among what it added.

    Args:
        methods: At least two, not attached, in order.

    Raises:
        CapabilityError: A method cannot follow the one before it.
    """

    def __init__(self, methods: Sequence[Method]) -> None:
        super().__init__()
        for earlier, later in itertools.pairwise(methods):
            _check_order(earlier, later)
        self.methods = tuple(methods)
        # Instance attributes: what a composition is depends on its members.
        self.name = "+".join(method.name for method in methods)  # type: ignore[misc]
        self.paper = methods[-1].paper  # type: ignore[misc]
        self.kind: Kind = methods[-1].kind  # type: ignore[misc]
        self.own_optimizer = next((m.own_optimizer for m in methods if m.own_optimizer), "")  # type: ignore[misc]
        attached_before = self._attached[:-1]
        reasons = [m.whole_weights for m in methods] + [methods[-1].whole_earlier if attached_before else ""]
        self.whole_weights = next(filter(None, reasons), "")  # type: ignore[misc]
        self.shards = methods[-1].shards  # type: ignore[misc]
        self.takes_turns = methods[-1].takes_turns  # type: ignore[misc]
        self.routes = any(method.routes for method in methods)  # type: ignore[misc]

    @property
    def _attached(self) -> list[Method]:
        return [method for method in self.methods[:-1] if not isinstance(method, WholeTensors)] + [self.methods[-1]]

    @property
    def writes_base(self) -> bool:
        """Whether the first member that is attached does: later ones choose among what it trains."""
        return self._attached[0].writes_base

    @property
    def needs_options(self) -> bool:
        """Whether the last member, which trains, does."""
        return self.methods[-1].needs_options

    @property
    def same_rows(self) -> int:
        """What the last member says, which trains."""
        return self.methods[-1].same_rows

    def calibration_examples(self, total: int) -> int:
        """Returns the most that a member looks at."""
        return max(method.calibration_examples(total) for method in self._attached)

    def name_tasks(self, tasks: Sequence[str], *, asked: Mapping[str, str] | None = None) -> None:
        """Tells every member."""
        for method in self.methods:
            method.name_tasks(tasks, asked=asked)

    def use_task(self, task: str | None) -> None:
        """Tells the member that routes, of which there is one at most."""
        next((method for method in self.methods if method.routes), self.methods[0]).use_task(task)

    def bind(self, *, total_steps: int) -> None:
        """Tells every member."""
        for method in self._attached:
            method.bind(total_steps=total_steps)

    def _attach(self, model: nn.Module, candidates: frozenset[str]) -> nn.Module:
        # What is learned belongs to the plain base, not to what an earlier member made of it.
        fingerprint = self._base_fingerprint
        calibration = CHOSEN_BEFORE if self._chosen_before else self._calibration
        earlier: Method | None = None
        for method in self.methods:
            if isinstance(method, WholeTensors) and method is not self.methods[-1]:
                candidates = method.narrow(model, candidates)
                continue
            method.earlier = earlier
            model = method.attach(model, candidates=candidates, calibration=calibration)
            method._base_fingerprint = fingerprint
            candidates, earlier = frozenset(method.trained_parameters()), method
        return model

    def check_arguments(self, arguments: TrainingArguments) -> None:
        """Lets every member check them."""
        for method in self.methods:
            method.check_arguments(arguments)

    def learned_tensors(self) -> dict[str, torch.Tensor]:
        """Returns what the last member says, which is what trains."""
        return self.methods[-1].learned_tensors()

    def at_rest(self) -> frozenset[str]:
        """Returns what the last member says, which is what trains."""
        return self.methods[-1].at_rest()

    def averages(self) -> frozenset[str]:
        """Returns what the last member says, which is what trains."""
        return self.methods[-1].averages()

    def touched(self) -> frozenset[str]:
        """Returns what any member may change."""
        return frozenset().union(*(method.touched() for method in self._attached))

    def saved_scalars(self) -> int:
        """Returns how many the last member has."""
        return self.methods[-1].saved_scalars()

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns what the last member trains."""
        return self.methods[-1].trained_shapes()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the members' states, each key behind its member's name and a slash."""
        return {f"{m.name}/{key}": tensor for m in self._attached for key, tensor in m.state_dict().items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Gives each member its part of :meth:`state_dict`."""
        for method in self._attached:
            prefix = f"{method.name}/"
            own = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
            method.load_state_dict(own)

    def save(self, folder: str | Path) -> None:
        """Lets each member write its own files: at most one adapter, and one state of all that train in place."""
        adapters, in_place = self._by_file()
        for method in adapters:
            method.save(folder)
        if in_place:
            in_place[0].save(folder, followers=in_place[1:])

    def load(self, folder: str | Path) -> None:
        """Lets each member read its own files."""
        adapters, in_place = self._by_file()
        for method in adapters:
            method.load(folder)
        if in_place:
            in_place[0].load(folder, followers=in_place[1:])

    def _by_file(self) -> tuple[list[Method], list[InPlace]]:
        in_place = [method for method in self._attached if isinstance(method, InPlace)]
        return [method for method in self._attached if not isinstance(method, InPlace)], in_place

    def merge(self) -> nn.Module:
        """Detaches the members, the last one first."""
        for method in reversed(self._attached):
            model = method.merge()
        self._model = None
        return model

    def export_adapter(self, folder: str | Path) -> None:
        """Exports the member that holds the whole update: the first that is attached."""
        self._attached[0].export_adapter(folder)

    def draw(self, folder: Path) -> None:
        """Lets each member draw, those that only name candidates too."""
        for method in self.methods:
            method.draw(folder)

    def callbacks(self) -> list[TrainerCallback]:
        """Returns one callback for the state of all members, and what else the members need."""
        from finetune.methods.callback import MethodCallback

        own = [callback for method in self._attached for callback in method.callbacks()]
        return [MethodCallback(self), *(callback for callback in own if not isinstance(callback, MethodCallback))]

    def metadata(self) -> dict[str, Any]:
        """Returns the metadata with the members' configs as a list."""
        configs = [{"name": method.name, **method.config.model_dump(mode="json")} for method in self.methods]
        return {**super().metadata(), "config": configs}

    def summary(self) -> MethodSummary:
        """Returns what the last member trains, of the plain base."""
        last = self.methods[-1].summary()
        return MethodSummary(self.name, last.trained, self._total, last.trained_bytes, self._chosen())

    def _chosen(self) -> tuple[str, ...]:
        return tuple(f"{method.name}: {line}" for method in self._attached for line in method.summary().chosen)


def _check_order(earlier: Method, later: Method) -> None:
    if isinstance(earlier, WholeTensors) and earlier.takes_turns:
        raise CapabilityError(
            f"{later.name} cannot follow {earlier.name}, which before another method would name tensors once, so that "
            "none would take turns",
            where="method",
            fix=f"method: [{{name: {later.name}}}, {{name: {earlier.name}}}], or top_layers or spectrum in its place",
        )
    if isinstance(earlier, WholeTensors) or (later.narrows_added and earlier.kind == "adapter"):
        return
    if later.narrows_entries and isinstance(earlier, SelectedEntries) and not isinstance(earlier, ScheduledEntries):
        return
    if later.narrows_entries and isinstance(earlier, ScheduledEntries):
        reason = f"{earlier.name} goes on choosing entries by their gradients, and {later.name} has none"
    elif earlier.kind == later.kind == "adapter":
        reason = "the second adapter would wrap the modules of the first, and neither could be saved alone"
    else:
        reason = f"{later.name} chooses among the base's own weights, and {earlier.name} leaves none of them trainable"
    swapped = f"method: [{{name: {later.name}}}, {{name: {earlier.name}}}]"
    if later.narrows_entries and isinstance(earlier, ScheduledEntries):
        fix = f"method: [{{name: fish}}, {{name: {later.name}}}], which chooses by gradients once, at the start"
    else:
        fix = swapped if isinstance(later, WholeTensors) else "train with one of the two"
    raise CapabilityError(f"{later.name} cannot follow {earlier.name}: {reason}", where="method", fix=fix)
