"""Runnable recipes, one per thing a user may want to do."""

if not __name__.startswith("finetune."):
    raise ImportError("import this package as finetune.recipes")
