"""safetensors' names of dtypes, and torch's."""

from __future__ import annotations

import re
from math import prod

import torch

from fewbit.checkpoints.interface import TensorHeader
from fewbit.spec.element import BF16, E4M3, E5M2, E8M0, F16, F32, Element

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
"""Dtypes of a tensor that is not quantized."""

SCALE_ELEMENTS: dict[str, Element] = {
    "F16": F16,
    "BF16": BF16,
    "F32": F32,
    "F8_E4M3": E4M3,
    "F8_E5M2": E5M2,
    "F8_E8M0": E8M0,
    "U8": E8M0,  # files older than torch's dtype, and compressed-tensors to this day
}

_BY_DTYPE = {dtype: name for name, dtype in DTYPES.items()}
_BY_TORCH_NAME = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


def header_of(tensor: torch.Tensor) -> TensorHeader:
    """The header that a file would have for `tensor`."""
    return TensorHeader(_BY_DTYPE.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))


def nbytes(header: TensorHeader) -> int:
    """Bytes of the tensor's data."""
    bits = re.search(r"\d+", header.dtype)  # F8_E4M3, BF16, F6_E2M3: the first number is the width; BOOL has none
    return -(-prod(header.shape) * (int(bits[0]) if bits else 8) // 8)


def torch_name(dtype: torch.dtype) -> str:
    """torch's name without the package: `float8_e4m3fn`."""
    return str(dtype).removeprefix("torch.")


def accepts(needed: str | None, found: str) -> bool:
    """Whether a tensor whose header says `found` may stand where a spec needs torch's dtype `needed` (None: a float).

    Bytes of E8M0 come as U8 or F8_E8M0 and mean the same.
    """
    if needed is None:
        return found in FLOATS
    return _container(found) == _container(_BY_TORCH_NAME[needed])


def _container(dtype: str) -> str:
    return "U8" if dtype == "F8_E8M0" else dtype
