"""Which base model is this? A hash that does not depend on the dtype or the device that it was loaded with."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["base_fingerprint", "count_parameters", "is_tied", "weights_digest"]

_SAMPLES_PER_TENSOR = 64


def base_fingerprint(model: nn.Module) -> str:
    """Returns 16 hexadecimal digits over names, shapes and evenly spaced bfloat16-rounded values of the parameters.

    A model on the meta device has no values; its fingerprint covers names and shapes only.
    """
    import torch

    digest = hashlib.sha256()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            if not parameter.is_meta:
                flat = parameter.detach().reshape(-1)
                stride = max(1, flat.numel() // _SAMPLES_PER_TENSOR)
                sample = flat[::stride].to("cpu", torch.bfloat16)
                digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def weights_digest(model: nn.Module) -> str:
    """Returns the SHA-256 over names, shapes and every value of the parameters, as 64 hexadecimal digits.

    Values count as float32, so that 16-bit weights have the same digest when they are loaded wider.
    """
    import torch

    digest = hashlib.sha256()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            values = parameter.detach().to("cpu", torch.float32).contiguous()
            digest.update(values.numpy().data)
    return digest.hexdigest()


def count_parameters(model: nn.Module) -> int:
    """Returns the number of scalars of ``model``, a shared tensor counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def is_tied(model: nn.Module) -> bool:
    """Returns whether the output head of a transformers model is the same tensor as its input embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    return head is not None and head.weight is embedding.weight
