"""The leaf that everything may import: errors, registry, files, and the form of the learned state."""
