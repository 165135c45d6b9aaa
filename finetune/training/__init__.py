"""Training with stock ``transformers.Trainer``: checks, checkpoints, exact resume, the run directory."""
