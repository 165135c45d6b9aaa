"""From files to batches: formats -> messages -> tokens with a loss mask -> batches."""
