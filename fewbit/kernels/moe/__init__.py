"""Kernels of gated experts, one file each; `interface.py` is their contract, `reference.py` their definition."""
