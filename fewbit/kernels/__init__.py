"""Kernels that run quantized layers, and the oracle that chooses among them and explains itself."""
