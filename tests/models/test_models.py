"""From a name to a model: sources, refusals, dtype, ties."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from finetune.core.errors import CapabilityError, ConfigError
from finetune.models import load_model, load_tokenizer, load_tuned, resolve_source
from finetune.models.dtype import best_attention, best_dtype
from support.tiny import save_tiny_model, tiny_llama


def test_a_folder_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    model = load_model(str(folder), dtype="float32", device="cpu")
    expected = tiny_llama()
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert load_model(str(folder), dtype="bfloat16", device="cpu").dtype == torch.bfloat16
    assert load_model(str(folder), meta=True).device.type == "meta"


def test_the_tokenizer_pads_right_and_has_a_pad_token(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("pad_token", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(folder), chat_template="chatml")
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("right", tokenizer.eos_token)
    assert "system" not in tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)


def test_untie_gives_the_head_its_own_weights_and_says_so(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    kept, untied = load_model(str(folder)), load_model(str(folder), tied="untie")
    assert kept.get_output_embeddings().weight is kept.get_input_embeddings().weight
    assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight
    assert torch.equal(untied.get_output_embeddings().weight, untied.get_input_embeddings().weight)
    assert untied.config.tie_word_embeddings is False


def test_names_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no model"):
        resolve_source(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="does not exist") as caught:
        resolve_source(str(tmp_path / "emtpy"))
    assert caught.value.near == "empty"
    with pytest.raises(ConfigError, match="no bundled model") as caught:
        resolve_source("bundled:smollm2-135m")
    assert caught.value.near == "smollm2-135m-instruct"
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model("nobody/no-such-model")
    (tmp_path / "bad.gguf").write_bytes(b"not gguf")
    with pytest.raises(ConfigError, match="cannot read the GGUF file"):
        resolve_source(str(tmp_path / "bad.gguf"))


def test_encoder_decoders_and_multimodal_models_are_refused_with_the_reason(tmp_path: Path) -> None:
    from transformers import LlavaConfig, T5Config

    T5Config(num_layers=1).save_pretrained(tmp_path / "t5")
    LlavaConfig().save_pretrained(tmp_path / "llava")
    with pytest.raises(CapabilityError, match="encoder-decoder"):
        load_model(str(tmp_path / "t5"))
    with pytest.raises(CapabilityError, match="multimodal") as caught:
        load_model(str(tmp_path / "llava"))
    assert "vision_config" in caught.value.got


def test_auto_choices_are_ones_that_exist() -> None:
    device = torch.device("cpu")
    assert best_dtype(device) in (torch.float32, torch.bfloat16)
    shape = {"device": device, "dtype": torch.float32, "batch": 2, "heads": 2, "head_dim": 8}
    assert best_attention(length=16, **shape) in ("eager", "sdpa")
    assert best_attention(length=4096, **shape) == "sdpa"


@pytest.mark.real
def test_the_bundled_model_trains_saves_and_has_the_logits_of_its_gguf_file(tmp_path: Path) -> None:
    folder = Path(resolve_source("bundled:smollm2-135m-instruct"))
    model = load_model(str(folder), dtype="float32", device="cpu")
    assert not hasattr(model, "hf_quantizer")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path / "again")
    again, tokenizer = load_tuned(str(folder), dtype="float32", device="cpu")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(again(ids).logits, logits)
        assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
