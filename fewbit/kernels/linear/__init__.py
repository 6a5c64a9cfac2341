"""Kernels for linear layers, one file each; `reference.py` is the definition that the others are tested against."""
