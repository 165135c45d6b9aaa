"""Writes a Llama of any size with random weights and the bundled tokenizer: for trying what does not fit in memory.

Run: python benchmarks/random_model.py runs/random-7b [--layers 32] [--width 4096]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 4096


def write_model(folder: Path, *, layers: int, width: int, vocabulary: int = VOCABULARY) -> int:
    """Writes a random Llama in bfloat16, block by block, and returns the bytes of its weights."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        tie_word_embeddings=True,
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    names: dict[str, str] = {}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        part = name.split(".")[2] if ".layers." in name else "rest"
        parts.setdefault(part, {})[name] = parameter
    total = 0
    for part, shapes in parts.items():
        file = f"model-{part}.safetensors"
        tensors = {
            name: torch.ones(shape.shape, dtype=torch.bfloat16)
            if shape.ndim == 1
            else torch.randn(shape.shape).mul_(0.02).bfloat16()
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes a model."""
    from variants import MODEL

    from finetune.models import load_tokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096, help="a multiple of 256")
    given = parser.parse_args(arguments)
    tokenizer = load_tokenizer(MODEL)
    tokenizer.save_pretrained(given.folder)
    size = write_model(given.folder, layers=given.layers, width=given.width, vocabulary=len(tokenizer))
    print(f"{given.folder}: {size / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
