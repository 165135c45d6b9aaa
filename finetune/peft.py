"""Import this before stock PEFT loads an adapter that ``mos``, ``prolora``, ``pure_sharing`` or ``mosa`` trained."""

from finetune.methods.primitives.mosa_tuner import MosaConfig, MosaTuner
from finetune.methods.primitives.shard_tuner import ShardsConfig, ShardsTuner

__all__ = ["MosaConfig", "MosaTuner", "ShardsConfig", "ShardsTuner"]
