"""Quantizing a checkpoint: options to a plan, calibration block by block, codes, export."""
