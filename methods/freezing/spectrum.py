"""Spectrum: trains the modules whose weights stand out most from noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from finetune.core.errors import TargetError
from finetune.methods.base import FILE, MethodConfig
from finetune.methods.registry import register
from finetune.methods.whole_tensors import WholeTensors, WholeTensorsConfig

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Spectrum", "SpectrumConfig"]


class SpectrumConfig(WholeTensorsConfig):
    """Which modules train."""

    top_percent: float = Field(
        default=25, gt=0, le=100, description="Percentage of the modules of each type that trains."
    )
    modules: list[Literal["attn", "mlp"]] = Field(
        default=["attn", "mlp"], min_length=1, description="Parts of the transformer layers whose matrices are ranked."
    )
    threshold: Literal["spectrum", "median"] = Field(
        default="spectrum",
        description="Which singular values are signal: by the published rule, or those above the edge of noise that "
        "their median tells.",
    )
    order: Literal["top", "bottom", "random"] = Field(
        default="top", description="Which end of the ranking trains; bottom and random are controls."
    )
    rounding: Literal["floor", "ceil"] = Field(
        default="floor", description="Of the number of modules per type; floor leaves out types of a single module."
    )
    scores: str | None = Field(
        default=None,
        description="File of scores (snr_results_*.json) to take instead of scanning the weights.",
        json_schema_extra=FILE,
    )
    exclude: list[str] = Field(default=[], description="Patterns of parameters that are neither ranked nor trained.")
    train_embeddings: bool = Field(default=False, description="Whether the input embedding trains besides.")
    train_head: bool = Field(
        default=False, description="Whether the output head trains besides; a tied one is the embedding."
    )
    train_norms: bool = Field(default=False, description="Whether all norms train besides.")
    seed: int = Field(default=0, description="Seed of the random order.")


@register("spectrum")
class Spectrum(WholeTensors):
    """Trains the modules of highest signal-to-noise ratio, a percentage of those of each type.

    The score of a matrix is the sum of the singular values above a noise edge, over that of the others, over the
    largest. Modules are compared with those of their own type only (``mlp.up_proj`` in every layer): scores depend on
    shape and scale. Fused experts count as one module with the mean score of their slices. The scan reads one matrix
    per thread and is kept in the cache; ``finetune scan MODEL`` shows it.

    Differences from the authors' code: the head and the embedding do not always train (``train_head`` and
    ``train_embeddings``), types are compared by equality and not by substring, a matrix without noise ranks first.

    References:
        Hartford et al., "Spectrum: Targeted Training on Signal to Noise Ratio", arXiv 2406.06623, section 3.
    """

    paper: ClassVar[str] = "arXiv 2406.06623"
    Config: ClassVar[type[MethodConfig]] = SpectrumConfig
    config: SpectrumConfig

    def choose(self, model: nn.Module, candidates: frozenset[str]) -> Sequence[str]:
        """Returns the parameters of the chosen modules, and of embedding, head and norms where asked for."""
        from finetune.methods.primitives.module_types import share_of
        from finetune.methods.primitives.parameter_patterns import match_parameters, parameter_kinds

        kinds = parameter_kinds(model)
        excluded = match_parameters(model, kinds, self.config.exclude, "method.exclude").values()
        allowed = candidates.difference(*excluded)
        matrices = {
            name.removesuffix(".weight"): parameter
            for name, parameter in model.named_parameters()
            if name in allowed and parameter.ndim in (2, 3) and kinds[name] & set(self.config.modules)
        }
        if not matrices:
            raise TargetError(
                f"spectrum finds no matrices in the {' and '.join(self.config.modules)} parts of the layers",
                got=type(model).__name__,
                want="a transformer whose layers are a list of modules",
            )
        ranking = self._ranking(model, matrices)
        self._by_type = {
            kind: names[: share_of(len(names), self.config.top_percent, self.config.rounding)]
            for kind, names in ranking.items()
        }
        chosen = [name for names in self._by_type.values() for name in names]
        self._ranked = {kind: len(names) for kind, names in ranking.items()}
        also = self._also(kinds)
        if not chosen and not also:
            raise TargetError(
                f"{self.config.top_percent:g} % of {max(self._ranked.values())} modules of a type are none",
                where="method.top_percent",
                fix="method.rounding: ceil, or a larger percentage",
            )
        heads = tuple(f"{name}." for name in chosen)
        exact = frozenset(chosen)
        return [
            name
            for name, _ in model.named_parameters()
            if name in allowed and (name in exact or name.startswith(heads) or kinds[name] & also)
        ]

    def _also(self, kinds: dict[str, frozenset[str]]) -> frozenset[str]:
        config = self.config
        asked = (("embed", config.train_embeddings), ("head", config.train_head), ("norm", config.train_norms))
        return frozenset(kind for kind, wanted in asked if wanted) & frozenset().union(*kinds.values())

    def _ranking(self, model: nn.Module, matrices: dict[str, nn.Parameter]) -> dict[str, list[str]]:
        """Returns the modules of each type, those that train first."""
        import random

        from finetune.methods.primitives.module_types import by_type, ranked

        self._found: dict[str, float] = {}
        if self.config.order == "random":
            generator = random.Random(self.config.seed)
            return {kind: generator.sample(names, len(names)) for kind, names in by_type(matrices).items()}
        self._found = self._scores(model, matrices)
        ranking = ranked(self._found)
        return ranking if self.config.order == "top" else {kind: names[::-1] for kind, names in ranking.items()}

    def draw(self, folder: Path) -> None:
        """Writes a heat map of the scores, what trains framed; nothing of a random order, which looks at none."""
        from finetune.methods.primitives.heat_map import write_heat_map

        if self._found:
            title = f"{self.config.threshold} threshold; colour: rank within the type; framed: trains"
            write_heat_map(folder / "signal_to_noise_ratios.png", self._found, self._by_type, title=title)

    def _scores(self, model: nn.Module, matrices: dict[str, nn.Parameter]) -> dict[str, float]:
        from tqdm import tqdm

        from finetune.methods.primitives.spectrum_files import read_scores, require_modules
        from finetune.methods.primitives.spectrum_scan import cached_scan

        if self.config.scores is not None:
            stored = read_scores(self.config.scores)
            every = [name.removesuffix(".weight") for name, _ in model.named_parameters(remove_duplicate=False)]
            require_modules(stored, every, self.config.scores, needed=matrices)
            return {name: score for name, score in stored.items() if name in matrices}
        if any(weight.is_meta for weight in matrices.values()):
            return dict.fromkeys(matrices, 0.0)  # without weights, how many train is known all the same
        weights = {name: weight.detach for name, weight in matrices.items()}
        with tqdm(desc="signal to noise of weights", total=len(weights), unit="matrix", disable=None) as bar:
            return cached_scan(weights, threshold=self.config.threshold, progress=bar.update)

    def _notes(self) -> tuple[str, ...]:
        parts = ", ".join(f"{kind} {count}" for kind, count in self._ranked.items())
        source = self.config.scores or f"{self.config.threshold} threshold"
        if self.config.order == "random":
            source = f"seed {self.config.seed}"
        return (
            f"{self.config.order} {self.config.top_percent:g} % of each type ({parts}; {source})",
            *super()._notes(),
        )
