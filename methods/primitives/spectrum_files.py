"""Files of signal-to-noise ratios and of unfrozen parameters, as Spectrum's authors and other tools read them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from finetune.core.errors import ConfigError
from finetune.core.files import write_json, write_text
from finetune.methods.primitives.module_types import module_type

__all__ = ["published_name", "read_scores", "require_modules", "write_scores", "write_unfrozen"]

_ANCHORED = ("^lm_head.weight$", "^model.embed_tokens.weight$")
"""What the authors' tool puts first, whatever the scores."""


def published_name(model: str) -> str:
    """Returns what the authors' tool calls the scores of a model."""
    return f"snr_results_{model.replace('/', '-').replace('_', '-')}.json"


def read_scores(path: str | Path) -> dict[str, float]:
    """Returns module name -> score, in the order of the file, of either schema in circulation.

    One has ``{module: {"snr": score, "type": type}}``, the other ``{type: {module: score}}``.

    Raises:
        ConfigError: The file is missing, or holds no scores.
    """
    path = Path(path)
    want = '{"model.layers.0.mlp.up_proj": {"snr": 0.5, "type": "mlp.up_proj"}, ...}, as finetune scan writes it'
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        scores: dict[str, float] = {}
        for name, entry in content.items():
            scores |= {name: float(entry["snr"])} if "snr" in entry else {key: float(x) for key, x in entry.items()}
    except OSError as error:
        raise ConfigError("the file of scores cannot be read", where=str(path), got=str(error.strerror)) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError("this is no file of signal-to-noise ratios", where=str(path), want=want) from error
    if not scores or any(math.isnan(score) for score in scores.values()):
        raise ConfigError(
            "the file of scores holds none" if not scores else "scores are not numbers",
            where=", ".join([str(path), *(name for name, score in scores.items() if math.isnan(score))][:4]),
            want=want,
        )
    return scores


def require_modules(scores: Collection[str], modules: Iterable[str], where: str, *, needed: Iterable[str]) -> None:
    """Checks that scores are of this model.

    Args:
        scores: The modules that have one.
        modules: Those of the model.
        where: The file, for messages.
        needed: Those that have to have one.

    Raises:
        ConfigError: They name modules that it has not, or one that is needed has none.
    """
    foreign = sorted(set(scores) - set(modules))
    if foreign:
        raise ConfigError(
            "the scores are of another model",
            where=where,
            got=f"{len(foreign)} of {len(scores)} modules are not in this one, such as {', '.join(foreign[:3])}",
            fix="finetune scan MODEL",
        )
    missing = [name for name in needed if name not in scores]
    if missing:
        raise ConfigError(
            "modules that are to be ranked have no score",
            where=where,
            got=f"none for {len(missing)} modules, such as {', '.join(missing[:3])}",
            fix="method.exclude or method.modules, or finetune scan MODEL",
        )


def write_scores(path: Path, scores: Mapping[str, float]) -> None:
    """Writes scores in the first schema; infinite ones as ``Infinity``, which the tools that read it expect."""
    write_json(path, {name: {"snr": score, "type": module_type(name)} for name, score in scores.items()})


def write_unfrozen(path: Path, chosen: Mapping[str, Sequence[str]]) -> None:
    """Writes type -> modules in rank order as the YAML list that other trainers take; head and embedding come first."""
    lines = ["unfrozen_parameters:", *(f"- {pattern}" for pattern in _ANCHORED)]
    for kind, names in chosen.items():
        lines += [f"# {kind} layers", *(f"- {name}" for name in names)]
    write_text(path, "\n".join(lines) + "\n")
