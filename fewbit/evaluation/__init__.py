"""Proof: perplexity, divergence from a reference model, error by layer, speed, and `verify`."""
