"""Measured costs of kernels, and measured plans of programs, by device; `fewbit tune` writes them.

Tables of devices that were measured for a release lie beside this file, a user's own in a folder of the user's.
"""
