"""What a run shows while it trains, and the numbers it leaves: a bar or lines on stderr, and ``metrics.jsonl``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.training.memory import peak_device_bytes

if TYPE_CHECKING:
    from finetune.training.trainer import FinetuneTrainer

__all__ = ["Metrics", "ProgressDisplay"]

METRICS = "metrics.jsonl"
_SMOOTHING = 0.9


class Metrics(TrainerCallback):
    """Appends one JSON object per log event to ``metrics.jsonl``; a resumed run first drops the steps it will repeat.

    Args:
        run: The run directory.
    """

    def __init__(self, run: Path) -> None:
        self._file = run / METRICS
        self.trainer: FinetuneTrainer | None = None
        self._last = (0, 0.0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Drops the lines after the step that the run starts from."""
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.is_file() else []
        kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
        if state.is_world_process_zero:
            self._file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._last = (self._tokens(state.global_step), time.perf_counter())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes a training or an evaluation event."""
        logs = logs or {}
        if "loss" in logs:
            self._write(state, self.training_event(state, logs))
        elif "eval_loss" in logs:
            self._write(state, {"step": state.global_step, "epoch": logs["epoch"], "eval_loss": logs["eval_loss"]})

    def training_event(self, state: TrainerState, logs: dict[str, float]) -> dict[str, float]:
        """Returns the fields of one training event, in the order in which they are shown."""
        tokens, now = self._tokens(state.global_step), time.perf_counter()
        rate = (tokens - self._last[0]) / max(now - self._last[1], 1e-9)
        self._last = (tokens, now)
        event = {
            "step": state.global_step,
            "epoch": round(logs["epoch"], 4),
            "loss": logs["loss"],
            "lr": logs["learning_rate"],
            "grad_norm": logs.get("grad_norm"),
            "tokens": tokens,
            "tokens_per_s": round(rate, 1),
            "mem_peak_gb": round(peak_device_bytes() / 1e9, 3),
            "time": round(time.time(), 1),
        }
        return {name: value for name, value in event.items() if value is not None}

    def _tokens(self, step: int) -> int:
        return self.trainer.tokens(step) if self.trainer is not None else 0

    def _write(self, state: TrainerState, event: dict[str, float]) -> None:
        if state.is_world_process_zero:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")


class ProgressDisplay(TrainerCallback):
    """One bar on a terminal, one line per log event elsewhere.

    Args:
        console: Where to; stderr.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: Any = None
        self._loss = 0.0
        self._weight = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Opens the bar."""
        if not (self._console.is_terminal and state.is_world_process_zero):
            return
        self._bar = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar.start()
        self._task = self._bar.add_task("train", total=state.max_steps, completed=state.global_step, numbers="")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Moves the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Shows the numbers."""
        if not logs or "loss" not in logs or not state.is_world_process_zero:
            return
        self._loss = _SMOOTHING * self._loss + (1 - _SMOOTHING) * logs["loss"]
        self._weight = _SMOOTHING * self._weight + (1 - _SMOOTHING)
        memory = f"mem_peak_gb={peak_device_bytes() / 1e9:.2f}"
        if self._bar is not None:
            numbers = f"loss {self._loss / self._weight:.3f}  lr {logs['learning_rate']:.2e}  {memory}"
            self._bar.update(self._task, numbers=numbers)
        else:
            norm = f" grad_norm={logs['grad_norm']:.3f}" if "grad_norm" in logs else ""
            self._console.print(
                f"step={state.global_step}/{state.max_steps} epoch={logs['epoch']:.2f} loss={logs['loss']:.4f} "
                f"lr={logs['learning_rate']:.2e}{norm} {memory}",
                highlight=False,
                soft_wrap=True,
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.stop()
