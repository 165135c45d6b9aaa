"""Which instruction data to train on: scorers, the engine that runs them, and rules that choose by their scores."""

if not __name__.startswith("finetune."):
    raise ImportError("import this package as finetune.data_selection")

from finetune.data_selection.base import RowScorer, Score, Scorer, ScorerConfig
from finetune.data_selection.registry import SCORERS, build_scorer, discover, register

__all__ = ["SCORERS", "RowScorer", "Score", "Scorer", "ScorerConfig", "build_scorer", "discover", "register"]
