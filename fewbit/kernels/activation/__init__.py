"""Kernels that quantize activations, shared by the linear kernels that need them."""
