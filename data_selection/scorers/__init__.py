"""The scorers: one file each."""
