"""Products of calibration on CPUs with matrix units for bfloat16 (AMX), which are many times as fast as float32 there.

States and weights stay float32. What a product reads is rounded to bfloat16, and sums are float32: what a bf16 model
computes on a GPU, but for its rounding of every result. Solving, whose factorizations need the digits, is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fewbit.kernels.probe import this_machine


def rounds_products(device: torch.device) -> bool:
    """Whether products of calibration on `device` are such."""
    return device.type == "cpu" and {"amx", "bf16"} <= this_machine("cpu").features


@contextmanager
def calibration_products(device: torch.device) -> Iterator[None]:
    """Meanwhile float32 products are made as the head of this file says, where the device is such a CPU."""
    if not rounds_products(device):
        yield
        return
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
