"""Scores the modules of a model by signal-to-noise ratio, and writes what other tools and people read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.core.errors import TargetError
from finetune.methods.primitives.heat_map import write_heat_map
from finetune.methods.primitives.module_types import ranked, share_of
from finetune.methods.primitives.signal_to_noise import Threshold
from finetune.methods.primitives.spectrum_files import published_name, write_scores, write_unfrozen
from finetune.methods.primitives.spectrum_scan import cached_scan
from finetune.scan.weight_files import weight_readers

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ModelScan", "scan_model"]


@dataclass(frozen=True)
class ModelScan:
    """What a scan found.

    Attributes:
        scores: Module -> signal-to-noise ratio, in the order of the files.
        chosen: Type -> the modules of the top percentage, in rank order.
        files: What was written.
    """

    scores: dict[str, float]
    chosen: dict[str, list[str]]
    files: list[Path]

    def rows(self) -> list[list[str]]:
        """Returns per type: its name, how many modules, how many are chosen, the extremes, and the chosen layers."""
        rows = []
        for kind, names in ranked(self.scores).items():
            layers = [next((part for part in name.split(".") if part.isdigit()), name) for name in self.chosen[kind]]
            extremes = [f"{self.scores[names[place]]:.4g}" for place in (0, -1)]
            rows.append([kind, str(len(names)), str(len(layers)), *extremes, " ".join(layers)])
        return rows


def scan_model(
    name_or_path: str,
    out: Path,
    *,
    threshold: Threshold = "spectrum",
    top_percent: float = 25,
    progress: Callable[[int], Callable[[], object]] = lambda total: lambda: None,
) -> ModelScan:
    """Scores the matrices of a model's layers, and writes ``snr_results_*.json``, its selection as YAML, and a picture.

    The model is not loaded: one weight per thread is read at a time. One that was scanned before is read only to see
    that it is the same.

    Args:
        name_or_path: Hub id, folder, GGUF file or bundled model.
        out: Folder for the files, made if absent.
        threshold: What counts as signal.
        top_percent: Percentage of each type that the YAML list and the table name.
        progress: Given the number of matrices, returns what is called after each.

    Raises:
        ConfigError: The model does not exist, or has no safetensors files.
        TargetError: It has no layers with matrices, or a weight is zero or not finite.
    """
    readers = _layer_matrices(name_or_path)
    scores = cached_scan(readers, threshold=threshold, progress=progress(len(readers)))
    ranking = ranked(scores)
    chosen = {kind: names[: share_of(len(names), top_percent)] for kind, names in ranking.items()}
    name = published_name(name_or_path.removeprefix("bundled:"))
    table = out / name
    listing = out / f"{name.removesuffix('.json')}_unfrozenparameters_{top_percent:g}percent.yaml"
    picture = out / f"{name.removesuffix('.json')}.png"
    write_scores(table, scores)
    write_unfrozen(listing, chosen)
    write_heat_map(picture, scores, chosen, title=f"{name_or_path} · signal-to-noise ratio, {threshold} threshold")
    return ModelScan(scores, chosen, [table, listing, picture])


def _layer_matrices(name_or_path: str) -> dict[str, Callable[[], Tensor]]:
    """Returns the readers of what Spectrum ranks, by module: the matrices in attention and feed-forward parts."""
    from finetune.methods.primitives.parameter_patterns import parameter_kinds
    from finetune.models import load_model

    blank = load_model(name_or_path, meta=True)
    kinds = parameter_kinds(blank)
    wanted = [name for name, p in blank.named_parameters() if p.ndim in (2, 3) and kinds[name] & {"attn", "mlp"}]
    readers = weight_readers(name_or_path)
    absent = [name for name in wanted if name not in readers]
    if absent:
        # A checkpoint that stores experts one by one, or under other names: only transformers knows how to read it.
        model = load_model(name_or_path, dtype="auto", device="cpu")
        return {name.removesuffix(".weight"): model.get_parameter(name).detach for name in wanted}
    if not wanted:
        raise TargetError("the model has no layers with matrices", where=name_or_path, got=type(blank).__name__)
    return {name.removesuffix(".weight"): readers[name] for name in wanted}
