"""Triton code that runs on the device. Imported only when a kernel runs: Triton is optional."""
