"""Scan of a model's weights by signal-to-noise ratio, beside the singular value decomposition of the same weights.

Time: the 210 matrices in the layers of the bundled model, one process, the two ways alternating, medians; both may use
all threads. The selection of the top quarter has to be the same. Memory: what a scan of a file of five 2048 x 7168
float32 matrices (the shape of a Llama's feed-forward, halved) adds to the resident memory of a process with one thread;
each thread reads a matrix of its own. Two of the five are equal, so that they are computed again in float64.

Run: python benchmarks/spectrum_scan.py [--quick] [--json PATH]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from claims import Claim, argument_parser, report

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "bundled:smollm2-135m-instruct"
SPEED_GOAL, MEMORY_GOAL = ">= 2.5", "<= 3"
SHAPE, MATRICES = (2048, 7168), 4
_SCAN = """
import re, sys
from pathlib import Path
from safetensors import safe_open
from finetune.methods.primitives.spectrum_scan import scan_weights
import torch

def reader(name):
    def read():
        with safe_open(sys.argv[1], framework="pt") as file:
            return file.get_tensor(name)
    return read

def status(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

scan_weights({"warm.up": lambda: torch.randn(64, 64)})
with safe_open(sys.argv[1], framework="pt") as file:
    names = list(file.keys())
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # begins a new high-water mark
scan_weights({name: reader(name) for name in names})
print(status("VmHWM") - before)
"""


def layer_matrices() -> dict[str, Tensor]:
    """Returns the matrices in the layers of the bundled model, by module."""
    from finetune.models import load_model

    model: Any = load_model(MODEL, dtype="float32", device="cpu")
    parameters = model.named_parameters()
    return {name.removesuffix(".weight"): p.detach() for name, p in parameters if p.ndim == 2 and ".layers." in name}


def by_gram(weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the scores as the product computes them."""
    from finetune.methods.primitives.spectrum_scan import scan_weights

    def reader(weight: Tensor) -> Callable[[], Tensor]:
        return lambda: weight

    return scan_weights({name: reader(weight) for name, weight in weights.items()})


def by_decomposition(weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the scores from float32 singular value decompositions, as the authors' code computes them."""
    import torch

    from finetune.methods.primitives.signal_to_noise import signal_to_noise

    return {
        name: signal_to_noise(torch.linalg.svdvals(weight).double().flip(0), *weight.shape)
        for name, weight in weights.items()
    }


def same_selection(first: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Returns whether two scans choose the same quarter of each type."""
    from finetune.methods.primitives.module_types import ranked, share_of

    def chosen(scores: Mapping[str, float]) -> list[list[str]]:
        return [names[: share_of(len(names), 25)] for names in ranked(scores).values()]

    return chosen(first) == chosen(other)


def time_claims(rounds: int) -> list[Claim]:
    """Returns how much faster the scan is, and whether it selects the same."""
    weights = layer_matrices()
    ways = {"scan": by_gram, "svd": by_decomposition}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    scores = {}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            scores[name] = way(weights)
            seconds[name].append(time.perf_counter() - start)
    scan, svd = (statistics.median(seconds[name]) for name in ways)
    same = float(same_selection(scores["scan"], scores["svd"]))
    return [
        Claim("spectrum/scan_speed_over_svd", svd / scan, "ratio", SPEED_GOAL, svd),
        Claim("spectrum/scan_seconds", scan, "seconds"),
        Claim("spectrum/same_selection_as_svd", same, "share", ">= 1"),
    ]


def memory_claim() -> Claim:
    """Returns the memory of a scan from a file, in multiples of its largest tensor."""
    import torch
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        generator = torch.Generator().manual_seed(0)
        tensors = {f"layers.{n}.up_proj": torch.randn(SHAPE, generator=generator) for n in range(MATRICES)}
        # One of them twice: nearly equal scores are computed again in float64.
        tensors[f"layers.{MATRICES}.up_proj"] = tensors["layers.0.up_proj"].clone()
        save_file(tensors, file)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _SCAN, str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    largest = 4 * SHAPE[0] * SHAPE[1]
    return Claim("spectrum/scan_memory_over_largest_tensor", int(done.stdout) / largest, "ratio", MEMORY_GOAL, largest)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures time and memory and reports."""
    import torch

    given = argument_parser(__doc__ or "").parse_args(arguments)
    claims = [*time_claims(1 if given.quick else 5), memory_claim()]
    report(f"scan of {MODEL}, {torch.get_num_threads()} threads", claims, given.json)


if __name__ == "__main__":
    main()
