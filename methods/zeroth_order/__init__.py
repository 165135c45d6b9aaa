"""Methods that estimate gradients by forward passes only."""
