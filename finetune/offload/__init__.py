"""Weights that stay on disk: a model's blocks are brought into memory one after the other, as they are computed."""

from finetune.offload.load import load_streamed
from finetune.offload.streamer import BlockStreamer, Traffic

__all__ = ["BlockStreamer", "Traffic", "load_streamed"]
