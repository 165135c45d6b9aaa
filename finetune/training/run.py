"""One run from a recipe to a tuned model: plan, evaluate, train, evaluate, save, report."""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from finetune.core.errors import FinetuneWarning, RefusedError, TrainingError
from finetune.core.files import replaced_folder, write_json, write_text
from finetune.methods.callback import EarlyStop
from finetune.report.model_card import write_model_card
from finetune.report.page import write_report
from finetune.report.plots import write_plots
from finetune.report.say import say, say_log
from finetune.training.activations import offload_activations
from finetune.training.checkpoint import check_identity, list_checkpoints
from finetune.training.describe import describe_end, describe_plan, describe_record
from finetune.training.estimate import estimate_plan
from finetune.training.inflight import InFlightChecks, StopOnSignal
from finetune.training.loss import LeanLoss
from finetune.training.memory import peak_device_bytes
from finetune.training.output_folder import (
    check_disk,
    check_output,
    checkpoint_to_resume,
    clear_output,
    read_record,
    started_again,
)
from finetune.training.plan import Plan, make_plan
from finetune.training.progress import Metrics, ProgressDisplay
from finetune.training.record import RunRecord, as_recorded
from finetune.training.sampler import EpochSampler
from finetune.training.trainer import FinetuneTrainer

if TYPE_CHECKING:
    from finetune.config.load import LoadedRecipe

__all__ = ["RunResult", "train"]

_DRY_RUN_EXAMPLES = 32
INTERRUPTED = 130


@dataclass
class RunResult:
    """What came of a run.

    Attributes:
        folder: The run directory.
        status: ``planned`` (dry run), ``completed`` or ``interrupted``.
        exit_code: 0, or 130 after a signal.
        record: The content of ``run.json``.
    """

    folder: Path
    status: str
    exit_code: int = 0
    record: dict[str, Any] = field(default_factory=dict)


def train(
    loaded: LoadedRecipe,
    *,
    dry_run: bool = False,
    resume: str | None = None,
    overwrite: bool = False,
    force: bool = False,
    console: Console | None = None,
) -> RunResult:
    """Runs a recipe.

    Args:
        loaded: The recipe, with what was given and where each key comes from.
        dry_run: Checks and prints the plan: no weight is read, nothing is written.
        resume: ``last`` or a checkpoint's path.
        overwrite: Replaces an earlier run in the output directory.
        force: Starts although the estimate says that memory does not suffice.
        console: Where progress goes; stderr by default.

    Raises:
        FinetuneError: What is wrong, before anything of an earlier run is touched; or why training stopped.
    """
    console = console or Console(stderr=True)
    run = Path(loaded.recipe.output_dir)
    if started_again(run):
        resume, overwrite = "last", False
    check_output(run, resume=resume is not None, overwrite=overwrite)
    if loaded.recipe.data.selection:
        from finetune.selection.for_training import select_for_training

        chosen = select_for_training(loaded, dry_run=dry_run, overwrite=overwrite, console=console)
        if chosen is None:
            return RunResult(run, "interrupted", INTERRUPTED)
        loaded = chosen
    if dry_run:
        return _dry_run(loaded, run, console)
    checkpoint = checkpoint_to_resume(run, resume)
    # What "auto" comes to is measured, so it may differ from run to run: the first one decides.
    plan = make_plan(loaded.recipe if checkpoint is None else as_recorded(loaded.recipe, run))
    return _Run(loaded, plan, run, console, checkpoint).execute(force=force, fresh=resume is None)


def _dry_run(loaded: LoadedRecipe, run: Path, console: Console) -> RunResult:
    plan = make_plan(loaded.recipe, meta=True, limit=_DRY_RUN_EXAMPLES)
    plan.attach()
    say(console, describe_plan(plan, estimate_plan(plan), run))
    return RunResult(run, "planned")


class _Run:
    """The steps of one run, in order; each leaves the run directory readable."""

    def __init__(self, loaded: LoadedRecipe, plan: Plan, run: Path, console: Console, checkpoint: Path | None) -> None:
        self.loaded, self.plan, self.run, self.console, self.checkpoint = loaded, plan, run, console, checkpoint
        self.is_main = plan.arguments.process_index == 0

    def execute(self, *, force: bool, fresh: bool) -> RunResult:
        engine = self.plan.engine
        earlier = {} if self.checkpoint is None else read_record(self.run)
        before: list[dict[str, Any]] = earlier.get("evaluation", {}).get("before", [])
        if self._wants_before() and not engine.together:
            before = self._evaluate(self.plan.model)
        model = self.plan.attach(self.checkpoint)
        estimate = estimate_plan(self.plan)
        self._preflight(estimate, force=force)
        if self.checkpoint is not None and (ended := _completed(self.run)) is not None:
            say(self.console, f"done     {self.run} is complete, there is nothing left to train")
            return RunResult(self.run, "completed", record=ended)
        if self.is_main:
            if fresh:
                clear_output(self.run)
            self._write_inputs()
            say(self.console, describe_plan(self.plan, estimate, self.run))
        record = RunRecord(self.run, describe_record(self.loaded, self.plan, estimate, before))
        if self.is_main:
            if earlier.get("plan", record.fields["plan"]) != record.fields["plan"]:
                say(self.console, "resume   the same rows per step, in other parts: equal to rounding")
            record.update()
        self.plan.arguments.distributed_state.wait_for_everyone()
        try:
            engine.prepare(model, self.plan.method, self.plan.arguments.device)
            if self._wants_before() and engine.together:
                # Nobody can compute alone with shards: this is the model as it is before its first step.
                before = self._evaluate(model)
                if self.is_main:
                    record.update(evaluation={"before": before, "after": []})
            return self._train_and_finish(model, record)
        except BaseException as error:
            if self.is_main:
                record.end("failed", error=str(error) or type(error).__name__)
            raise

    def _wants_before(self) -> bool:
        evaluation = self.loaded.recipe.eval
        return bool(evaluation.tasks) and evaluation.before and self.checkpoint is None and self._takes_part

    @property
    def _takes_part(self) -> bool:
        """Whether this process has to compute what only the main one reports."""
        return self.is_main or self.plan.engine.together

    def _evaluate(self, model: Any) -> list[dict[str, Any]]:
        from finetune.evaluation.run import evaluate_tasks

        section = self.loaded.recipe.eval
        results = evaluate_tasks(
            model,
            self.plan.tokenizer,
            section.tasks,
            limit=section.limit,
            batch_size=section.batch_size,
            max_new_tokens=section.max_new_tokens,
            samples=section.samples,
            console=self.console if self.is_main else None,
        )
        return [result.as_dict() for result in results]

    def _preflight(self, estimate: Any, *, force: bool) -> None:
        check_disk(
            self.run,
            checkpoint_bytes=3 * self.plan.method.summary().trained_bytes,
            checkpoints=self.plan.arguments.save_total_limit,
        )
        if self.checkpoint is not None:
            check_identity(self.checkpoint, self.plan.identity())
        if not estimate.fits and not force:
            raise RefusedError(
                "the run needs more memory than there is",
                got=f"estimate {estimate.peak / 1e9:.2f} GB, of it {estimate.largest}",
                want=f"at most {estimate.available / 1e9:.2f} GB",
                fix=f"{estimate.remedy}, or --force",
            )
        share = estimate.peak / max(1, estimate.available)
        if share > 0.9:
            warnings.warn(
                f"the run is estimated to need {share:.0%} of the memory that is free, so it may be killed",
                FinetuneWarning,
                stacklevel=2,
            )

    def _write_inputs(self) -> None:
        write_text(self.run / "config.yaml", self.loaded.given)
        write_text(self.run / "config.resolved.yaml", self.loaded.resolved_yaml())
        dropped = [json.dumps(vars(row), ensure_ascii=False, default=str) for row in self.plan.train.dropped]
        if dropped:
            write_text(self.run / "dropped.jsonl", "\n".join(dropped) + "\n")
        examples = [self.plan.train.example(i) for i in range(min(8, len(self.plan.train.dataset)))]
        write_text(self.run / "samples.txt", "\n\n".join(examples) + "\n")
        self.plan.method.draw(self.run / "plots")

    def _train_and_finish(self, model: Any, record: RunRecord) -> RunResult:
        started = time.perf_counter()
        trainer, stop = self._build_trainer(model)
        lean = LeanLoss(model, head_whole=self.plan.engine.head_whole)
        config: Any = self.plan.model.config
        # A cache of keys and values is of no use here, and it would keep packed documents from being kept apart.
        use_cache, config.use_cache = config.use_cache, False
        try:
            with say_log(self.console):
                trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
        except RuntimeError as error:
            # torch has a class for accelerators; the CPU's allocator raises the plain one.
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            estimate = record.fields["memory"]["estimate_bytes"]["peak"]
            raise TrainingError(
                f"out of memory at step {trainer.state.global_step + 1}",
                got=f"{str(error).splitlines()[0]} (peak {peak_device_bytes() / 1e9:.2f} GB, estimate "
                f"{estimate / 1e9:.2f} GB)",
                fix="a smaller train.per_device_train_batch_size with more train.gradient_accumulation_steps, "
                "train.activation_checkpointing: true, or a smaller data.max_length",
            ) from error
        finally:
            lean.remove()
            if trainer.activations is not None:
                trainer.activations.close()
            config.use_cache = use_cache
        seconds = time.perf_counter() - started
        if stop.received is not None:
            return self._interrupted(record, seconds)
        if not self._takes_part:
            return RunResult(self.run, "completed")
        peak = peak_device_bytes()
        final = _final_numbers(trainer)
        streaming = None if self.plan.streamer is None else asdict(self.plan.streamer.traffic())
        away = None if trainer.activations is None else trainer.activations.bytes_away
        self._save_final(record)
        after = self._evaluate(model)
        if not self.is_main:
            return RunResult(self.run, "completed")
        saved = sum(file.stat().st_size for file in (self.run / "final").glob("*.safetensors"))
        memory = {**record.fields["memory"], "measured_peak_bytes": peak, "saved_bytes": saved}
        evaluation = {**record.fields["evaluation"], "after": after}
        record.end(
            "completed",
            seconds=seconds,
            final=final,
            memory=memory,
            evaluation=evaluation,
            streaming=streaming,
            activations_away_bytes=away,
        )
        self._report(record)
        return RunResult(self.run, "completed", record=record.fields)

    def _build_trainer(self, model: Any) -> tuple[FinetuneTrainer, StopOnSignal]:
        plan = self.plan
        arguments = plan.arguments
        sampler = EpochSampler(
            plan.train.dataset["length"],
            batch_size=plan.rows_per_step,
            seed=plan.recipe.seed,
            group_by_length=plan.recipe.data.group_by_length,
            same_rows=plan.method.same_rows,
            micro_batch=arguments.per_device_train_batch_size,
        )
        metrics, stop = Metrics(self.run), StopOnSignal()
        trainer = FinetuneTrainer(
            method=plan.method,
            sampler=sampler,
            identity=plan.identity(),
            engine=plan.engine,
            activations=offload_activations(plan.recipe.engine.offload, model, self.run),
            model=model,
            args=arguments,
            data_collator=plan.collator(),
            train_dataset=plan.train.dataset,
            eval_dataset=None if plan.evaluation is None else plan.evaluation.dataset,
            callbacks=[
                EarlyStop(),
                InFlightChecks(plan.method, engine=plan.engine),
                metrics,
                ProgressDisplay(self.console),
                stop,
            ],
        )
        for default in ("PrinterCallback", "ProgressCallback"):
            for callback in [c for c in trainer.callback_handler.callbacks if type(c).__name__ == default]:
                trainer.remove_callback(callback)
        metrics.trainer = trainer
        return trainer, stop

    def _interrupted(self, record: RunRecord, seconds: float) -> RunResult:
        if self.is_main:
            record.end("interrupted", seconds=seconds)
            write_plots(self.run)
            write_report(self.run)
            last = list_checkpoints(self.run)[-1]
            say(
                self.console,
                f"stopped  {last} is complete\nnext     finetune train {self.run / 'config.resolved.yaml'} --resume",
            )
        return RunResult(self.run, "interrupted", INTERRUPTED, record.fields)

    def _save_final(self, record: RunRecord) -> None:
        with self.plan.engine.whole():
            self._write_final(record)

    def _write_final(self, record: RunRecord) -> None:
        if not self.is_main:
            self.plan.method.state_dict()  # what the main process saves is gathered from all of them
            return
        with replaced_folder(self.run / "final") as beside:
            self.plan.method.save(beside)
            self.plan.tokenizer.save_pretrained(beside)
            write_model_card(beside, record.fields)

    def _report(self, record: RunRecord) -> None:
        write_model_card(self.run / "final", record.fields)
        write_plots(self.run)
        write_report(self.run)
        write_json(self.run / "summary.json", _summary(record.fields))
        say(self.console, describe_end(self.run, record.fields))


def _completed(run: Path) -> dict[str, Any] | None:
    """Returns the record of a run that has ended well, or None."""
    record = read_record(run)
    return record if record.get("status") == "completed" else None


def _final_numbers(trainer: FinetuneTrainer) -> dict[str, float | None]:
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    evaluations = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    return {
        "loss": losses[-1] if losses else None,
        "eval_loss": evaluations[-1] if evaluations else None,
        "steps": trainer.state.global_step,
    }


def _summary(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures that scripts read: metrics before and after, seconds, bytes."""
    summary: dict[str, Any] = {}
    for moment, results in record["evaluation"].items():
        for result in results:
            summary[f"{result['metric']}_{moment}"] = result["value"]
    memory = record["memory"]
    return {
        **summary,
        "train_seconds": record["seconds"],
        "peak_memory_bytes": memory["measured_peak_bytes"],
        "saved_bytes": memory["saved_bytes"],
        "base_bytes": memory["base_bytes"],
    }
