"""Loads configs, tokenizers and models, and refuses what this package cannot fine-tune."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from finetune.core.errors import CapabilityError, ConfigError
from finetune.models.dtype import best_dtype, resolve_device
from finetune.models.source import resolve_source

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["check_model", "load_config", "load_model", "load_tokenizer", "resolve_dtype", "untie"]

_MODALITIES = ("vision_config", "audio_config", "speech_config")


def load_config(name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Returns the config of a causal LM, without its weights.

    Raises:
        ConfigError: The model does not exist or cannot be reached.
        CapabilityError: It is an encoder-decoder or multimodal model.
    """
    from transformers import AutoConfig

    source = resolve_source(name_or_path)
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise _unreachable(name_or_path, error) from error
    check_model(config, name_or_path)
    return cast("PreTrainedConfig", config)


def check_model(config: PreTrainedConfig, name: str) -> None:
    """Refuses models that are not text-only causal LMs.

    Raises:
        CapabilityError: The model is an encoder-decoder or takes images or sound.
    """
    want = "a decoder-only text model (AutoModelForCausalLM)"
    if getattr(config, "is_encoder_decoder", False):
        raise CapabilityError(
            "encoder-decoder models are not supported yet", where="model.name_or_path", got=name, want=want
        )
    modalities = [key for key in _MODALITIES if getattr(config, key, None) is not None]
    if modalities:
        raise CapabilityError(
            "multimodal models are not supported yet",
            where="model.name_or_path",
            got=f"{name} with {', '.join(modalities)}",
            want=want,
        )


def load_tokenizer(
    name_or_path: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """Returns the tokenizer, padding on the right, with the chat template that is asked for.

    A missing pad token becomes the EOS token: loss masks go by position, so the EOS keeps its loss.

    Args:
        name_or_path: Hub id, folder, GGUF file or bundled model.
        revision: Commit or branch of a hub model.
        trust_remote_code: Whether code in the model's repository may run.
        chat_template: ``tokenizer`` for its own (which must exist), the name of a shipped one, a path to a Jinja file,
            or None to leave it as it is.

    Raises:
        ConfigError: The tokenizer cannot be loaded.
        DataError: The template is unknown, or ``tokenizer`` has none.
    """
    from transformers import AutoTokenizer

    from finetune.data.templates import resolve_template

    # A run's final folder holds a tokenizer but no model.
    has_tokenizer = (Path(name_or_path) / "tokenizer_config.json").is_file()
    source = name_or_path if has_tokenizer else resolve_source(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise _unreachable(name_or_path, error) from error
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = resolve_template(chat_template, tokenizer)
    return cast("PreTrainedTokenizerBase", tokenizer)


def load_model(
    name_or_path: str,
    *,
    dtype: str = "auto",
    attn_implementation: str = "sdpa",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    tied: Literal["keep", "untie"] = "keep",
    meta: bool = False,
) -> PreTrainedModel:
    """Returns a causal LM in evaluation mode.

    Args:
        name_or_path: Hub id, folder, GGUF file or bundled model.
        dtype: ``auto`` (the fastest of bfloat16 and float32 on the device), or a torch dtype's name.
        attn_implementation: As in transformers.
        device: ``auto``, ``cpu``, ``cuda``, ``mps``.
        revision: Commit or branch of a hub model.
        trust_remote_code: Whether code in the model's repository may run.
        tied: ``untie`` gives the output head its own copy of a shared embedding, and says so in the config.
        meta: Builds the model without weights, on the meta device.

    Raises:
        ConfigError: The model does not exist or cannot be reached.
        CapabilityError: It is an encoder-decoder or multimodal model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config = load_config(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    target = resolve_device(device)
    options: dict[str, Any] = {
        "dtype": resolve_dtype(dtype, target),
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    if meta:
        with torch.device("meta"):
            model = auto.from_config(config, **options)
    else:
        source = resolve_source(name_or_path)
        try:
            model = auto.from_pretrained(source, revision=revision, **options).to(target)
        except (OSError, ValueError, ImportError) as error:
            raise _unreachable(name_or_path, error) from error
    if tied == "untie":
        untie(model)
    return cast("PreTrainedModel", model.eval())


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the torch dtype of that name; ``auto`` is the fastest of bfloat16 and float32 on ``device``."""
    import torch

    return best_dtype(device) if name == "auto" else cast(torch.dtype, getattr(torch, name))


def untie(model: Any) -> None:
    """Gives the output head its own copy of a shared embedding, and says so in the config."""
    import torch

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(embedding.weight.detach().clone())
    model.config.tie_word_embeddings = False


def _unreachable(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        "the model cannot be loaded",
        where="model.name_or_path",
        got=f"{name}: {str(error).strip().splitlines()[0]}",
        want="a folder with a Hugging Face model, a .gguf file, a hub id that is reachable or cached, or bundled:NAME",
    )
