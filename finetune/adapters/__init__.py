"""What runs learned in the base's own weights, put on and taken off a model, and combined."""

from finetune.adapters.diff import AdapterDiff, TensorDiff, diff
from finetune.adapters.fuse import fuse
from finetune.adapters.weights import apply, switch, unapply

__all__ = ["AdapterDiff", "TensorDiff", "apply", "diff", "fuse", "switch", "unapply"]
