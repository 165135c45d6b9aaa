"""From a name to a model and a tokenizer: hub id, local folder, GGUF file, bundled model."""

from finetune.models.load import check_model, load_config, load_model, load_tokenizer
from finetune.models.source import resolve_source
from finetune.models.tuned import load_tuned

__all__ = ["check_model", "load_config", "load_model", "load_tokenizer", "load_tuned", "resolve_source"]
