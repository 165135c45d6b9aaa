"""The registry of methods: what trains."""

if not __name__.startswith("finetune."):
    raise ImportError("import this package as finetune.methods: a bare 'methods' may be anyone's")

from finetune.methods.base import Method, MethodConfig, MethodSummary
from finetune.methods.registry import METHODS, build_method, discover, register

__all__ = ["METHODS", "Method", "MethodConfig", "MethodSummary", "build_method", "discover", "register"]
