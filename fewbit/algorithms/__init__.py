"""Algorithms that choose codes and scales, one file each.

The loop over blocks is in `fewbit.models.quantization.block_loop`."""
