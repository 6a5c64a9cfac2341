"""Code of the solvers for devices: Triton, imported only when they run on a GPU, and the compiled library for CPUs."""
