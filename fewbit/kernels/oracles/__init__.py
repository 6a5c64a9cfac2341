"""One small file per family of keys: its backends and their order. `kernels.select.choose` serves them all."""
