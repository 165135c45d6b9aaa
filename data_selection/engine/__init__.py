"""Runs a model over many rows: batches by length, only the logits that are read, a log that survives the process."""
