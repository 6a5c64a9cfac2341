"""Equivalent transformations: other weights that compute the same model and are easier to quantize."""
