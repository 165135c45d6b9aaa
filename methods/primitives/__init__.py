"""Autograd functions and in-place overlays that the families share; the only modules here that import torch."""
