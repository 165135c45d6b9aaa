"""Which instruction data to train on: scorers, samplers and the scoring loop."""

if not __name__.startswith("finetune."):
    raise ImportError("import this package as finetune.data_selection")
