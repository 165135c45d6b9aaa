"""Weights that stay on disk: what streaming costs in time, and training in a third of the memory that weights take.

Speed: one model of a random Llama shape that fits, in memory, read from disk and mapped, in one process, alternating,
medians of the rounds on the wall clock; its file is in the page cache. Steps of ``lozo`` and of LoRA on all linear
layers, which keeps its activations where the weights are in memory.

Memory: a process of its own in a control group of the kernel whose limit is a third of the weights trains both; what it
takes besides the page cache, which the kernel empties on demand, is looked at every 5 milliseconds. Where control
groups cannot be made, nothing enforces the limit and the claim says what was taken.

Run: python benchmarks/streaming.py [--quick] [--json PATH]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from claims import Claim, argument_parser, report
from random_model import VOCABULARY, write_model
from transformers import AutoModelForCausalLM

import finetune
from finetune.offload import BlockStreamer, load_streamed

SOURCES: tuple[Literal["disk", "mmap"], ...] = ("disk", "mmap")
METHODS = {"lozo": {"eps": 1e-2}, "lora": {"r": 8}}
_LIMITS = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}
"""Where control groups of either version are, and the file with the limit."""
_EPOCH = 0.005
"""Seconds between two looks at the memory."""


def step_of(method_name: str, model: Any, rows: int, length: int) -> Callable[[], None]:
    """Returns a training step of a method on random tokens."""
    method = finetune.method(method_name, **METHODS[method_name])
    tuned: Any = method.attach(model)
    tuned.train()
    optimizer = torch.optim.SGD(method.trained_parameters().values(), lr=1e-4)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        tuned(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_speed(folder: Path, method: str, *, rows: int, length: int, rounds: int) -> list[Claim]:
    """Returns how fast steps are compared with those of the resident model."""
    resident = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    steps = {"resident": step_of(method, resident, rows, length)}
    streamers: dict[str, BlockStreamer] = {}
    for source in SOURCES:
        model, streamers[source] = load_streamed(str(folder), source=source)
        steps[source] = step_of(method, model, rows, length)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number:  # the first round warms up
                taken[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    claims = [
        Claim(f"{method}/speed_{source}_over_resident", seconds["resident"] / seconds[source], "ratio", ">= 0.6")
        for source in SOURCES
    ]
    overlap = streamers["disk"].traffic().overlap
    for streamer in streamers.values():
        streamer.remove()
    return [
        *claims,
        Claim(f"{method}/overlap_disk", overlap, "share"),
        Claim(f"{method}/step_seconds_resident", seconds["resident"], "seconds"),
    ]


@contextmanager
def control_group(limit: int) -> Iterator[Path | None]:
    """Yields the file that a process enters a control group of so many bytes by, or None where none can be made."""
    group = next((made for place in _LIMITS.items() if (made := _made_group(*place, limit)) is not None), None)
    try:
        yield group and group / "cgroup.procs"
    finally:
        if group is not None:
            group.rmdir()


def _made_group(root: str, limited: str, limit: int) -> Path | None:
    group = Path(root) / f"finetune-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        (group / limited).write_text(str(limit))
    except OSError:
        group.rmdir()
        return None
    return group


def train_within(folder: Path, entrance: str, *, rows: int, length: int, steps: int) -> None:
    """Trains with each method in this process and prints what it took, as JSON."""
    if entrance:
        Path(entrance).write_text(str(os.getpid()))
    found: dict[str, Any] = {}
    with _watched() as peak:
        for method in METHODS:
            model, streamer = load_streamed(str(folder))
            step = step_of(method, model, rows, length)
            step()  # the first one of lozo measures the noise floor of its losses by many passes
            started = time.perf_counter()
            for _ in range(steps):
                step()
            found[method] = {
                "seconds": (time.perf_counter() - started) / steps,
                "overlap": streamer.traffic().overlap,
                "rate": streamer.traffic().bytes / streamer.traffic().seconds,
            }
            streamer.remove()
            del model, streamer, step
    print(json.dumps({**found, "peak": max(peak)}))


@contextmanager
def _watched() -> Iterator[list[int]]:
    """Looks at what this process takes besides mapped files until the context ends."""
    seen, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(_EPOCH):
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            seen.append(sum(1024 * int(status[name].split()[0]) for name in ("RssAnon", "RssShmem")))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def measure_memory(folder: Path, weights: int, *, rows: int, length: int, steps: int) -> list[Claim]:
    """Returns what training takes in a process that may take a third of the weights."""
    limit = weights // 3
    with control_group(limit) as entrance:
        command = [
            sys.executable,
            __file__,
            "--within",
            str(folder),
            str(entrance or ""),
            *map(str, (rows, length, steps)),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    claims = [
        Claim("lozo/peak_over_limit", found["peak"] / limit, "ratio", "<= 1"),
        Claim("lozo/weights_over_limit", weights / limit, "ratio", ">= 3"),
        Claim("lozo/limit_enforced", float(entrance is not None), "0 or 1"),
    ]
    for method in METHODS:
        claims += [
            Claim(f"{method}/step_seconds_within_limit", found[method]["seconds"], "seconds"),
            Claim(f"{method}/overlap_within_limit", found[method]["overlap"], "share"),
            Claim(f"{method}/disk_rate_within_limit", found[method]["rate"] / 1e9, "GB/s"),
        ]
    return claims


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and reports."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--within", nargs=5, metavar="X", help="what the process with the limit is started by")
    given = parser.parse_args(arguments)
    if given.within:
        folder, entrance, *sizes = given.within
        rows, length, steps = map(int, sizes)
        train_within(Path(folder), entrance, rows=rows, length=length, steps=steps)
        return
    quick = given.quick
    rows, length, rounds, width = (1, 32, 2, 256) if quick else (8, 128, 5, 2048)
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as temporary:
        fits = Path(temporary) / "fits"
        write_model(fits, layers=4 if quick else 8, width=width)
        for method in METHODS:
            claims += measure_speed(fits, method, rows=rows, length=length, rounds=rounds)
        large = Path(temporary) / "large"
        weights = write_model(large, layers=4 if quick else 34, width=width)
        if not quick:
            claims += measure_memory(large, weights, rows=1, length=128, steps=2)
    report(f"streamed blocks of width {width}, {torch.get_num_threads()} threads", claims, given.json)


if __name__ == "__main__":
    main()
