"""A GGUF file as a plain Hugging Face folder, converted once and kept in the user's cache.

transformers marks a model loaded with ``gguf_file=`` as quantised although its weights are dense float32: it refuses to
save or train it. The tensors go into a fresh model made from the config; logits are identical.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.core.errors import ConfigError
from finetune.core.files import cache_folder, hash_file, replaced_folder

__all__ = ["converted_gguf"]


def converted_gguf(file: Path) -> Path:
    """Returns the folder of the converted model, named by the file's content; converts it if it is not there yet.

    Raises:
        ConfigError: The file is not a GGUF file of a model that transformers knows.
    """
    from filelock import FileLock

    folder = cache_folder() / "gguf" / hash_file(file)[:16]
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _convert(file, folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    from rich.console import Console
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with Console(stderr=True).status(f"converting {file.name} once into {folder}"):
        try:
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            raise ConfigError(
                "transformers cannot read the GGUF file",
                where="model.name_or_path",
                got=f"{file}: {str(error).splitlines()[0]}",
                fix="a GGUF file of a supported architecture, or the original Hugging Face folder",
            ) from error
        del quantised.config.quantization_config
        # The name inside the file is the uploader's; a path is what base_model_name_or_path of an adapter needs.
        quantised.config._name_or_path = str(folder)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(quantised.config, dtype=quantised.dtype)
        model.load_state_dict(quantised.state_dict())
        model.tie_weights()
        model.generation_config = quantised.generation_config
        with replaced_folder(folder) as beside:
            model.save_pretrained(beside)
            tokenizer.save_pretrained(beside)
