"""Methods that add modules to the model."""
