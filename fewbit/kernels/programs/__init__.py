"""Triton code that runs on the device. Imported only when a kernel runs: Triton is optional.

It is a language of its own: compile-time arguments are written in capitals, every branch returns by itself, conditional
expressions are not what they are in Python, and what must stay in registers stays in one function.
"""
