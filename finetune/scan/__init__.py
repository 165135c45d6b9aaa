"""Looks at the weights of a model, file by file, without loading it: ``finetune scan``."""
