"""Import this before stock PEFT loads an adapter of a tuner of ours, or to make one with ``get_peft_model``."""

from finetune.methods.primitives.mosa_tuner import MosaConfig, MosaTuner
from finetune.methods.primitives.shard_tuner import ShardsConfig, ShardsTuner
from finetune.methods.primitives.skill_tuner import SkillsConfig, SkillsTuner

__all__ = ["MosaConfig", "MosaTuner", "ShardsConfig", "ShardsTuner", "SkillsConfig", "SkillsTuner"]
