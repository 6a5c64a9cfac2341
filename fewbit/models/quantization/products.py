"""How the products of calibration are made: forward passes and Gram matrices.

On CPUs with matrix units for bfloat16 (AMX), which are many times as fast as float32 there: states and weights stay
float32, what a product reads is rounded to bfloat16, and sums are float32, as a bf16 model's on a GPU but for its
rounding of every result. Solving, whose factorizations need the digits, is left alone.

On GPUs without cuDNN's attention: it plans every shape anew, which takes longer than the attention of a small model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fewbit.kernels.probe import this_machine


def rounds_products(device: torch.device) -> bool:
    """Whether float32 products of calibration on `device` round what they read."""
    return device.type == "cpu" and {"amx", "bf16"} <= this_machine("cpu").features


@contextmanager
def calibration_products(device: torch.device) -> Iterator[None]:
    """Meanwhile products are made as the head of this file says; torch's own settings are put back."""
    if device.type == "cuda":
        planned = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(planned)
    elif rounds_products(device):
        setting = torch.backends.mkldnn.matmul
        before, setting.fp32_precision = setting.fp32_precision, "bf16"
        try:
            yield
        finally:
            setting.fp32_precision = before
    else:
        yield
