"""CUDA C++ that is compiled on the user's machine by NVRTC, and what compiles, keeps and launches it.

`compiler` needs the package cuda-core, `driver` only what a machine with an NVIDIA GPU has; nothing here is linked
against torch or needs a compiler of the system.
"""
