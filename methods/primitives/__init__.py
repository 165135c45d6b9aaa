"""Autograd functions and in-place overlays that the families share; the only part of this package that imports torch."""
