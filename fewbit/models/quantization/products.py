"""How the products of calibration are made: forward passes and Gram matrices.

Blocks run in the model's dtype on GPUs and on CPUs with matrix units for bfloat16 (AMX), elsewhere in float32: few CPUs
multiply 16-bit floats as fast. With matrix units Gram matrices are made by them as well: of widened 16-bit rows, whose
products are exact, with float32 sums. Solving, whose factorizations need the digits, is left alone.

On GPUs without cuDNN's attention: it plans every shape anew, which takes longer than the attention of a small model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PretrainedConfig

from fewbit.kernels.probe import this_machine
from fewbit.models.names import config_dtype


def calibration_dtype(config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """What blocks of a model run in."""
    return torch.float32 if device.type == "cpu" and not has_matrix_units(device) else config_dtype(config)


def has_matrix_units(device: torch.device) -> bool:
    """Whether `device` is a CPU that multiplies bfloat16 many times as fast as float32."""
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
    elif has_matrix_units(device):
        setting = torch.backends.mkldnn.matmul
        before, setting.fp32_precision = setting.fp32_precision, "bf16"
        try:
            yield
        finally:
            setting.fp32_precision = before
    else:
        yield
