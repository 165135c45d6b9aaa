"""Import this before stock PEFT loads an adapter that ``mos``, ``prolora`` or ``pure_sharing`` trained."""

from finetune.methods.primitives.shard_tuner import ShardsConfig, ShardsTuner

__all__ = ["ShardsConfig", "ShardsTuner"]
