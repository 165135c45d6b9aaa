"""Methods that train whole tensors and freeze the rest."""
