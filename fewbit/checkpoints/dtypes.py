"""safetensors' names of dtypes, and torch's."""

from __future__ import annotations

import re
from functools import cache
from math import prod

from fewbit.checkpoints.interface import TensorHeader
from fewbit.lazy import torch
from fewbit.spec.element import BF16, E4M3, E5M2, E8M0, F16, F32, Element

TORCH_NAMES: dict[str, str] = {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""safetensors' name of a dtype -> torch's, without the package."""

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

_BY_TORCH_NAME = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of safetensors' name, one of `TORCH_NAMES`."""
    found: torch.dtype = getattr(torch, TORCH_NAMES[name])
    return found


def header_of(tensor: torch.Tensor) -> TensorHeader:
    """The header that a file would have for `tensor`."""
    return TensorHeader(_BY_TORCH_NAME.get(torch_name(tensor.dtype), str(tensor.dtype)), tuple(tensor.shape))


def nbytes(header: TensorHeader) -> int:
    """Bytes of the tensor's data."""
    return -(-prod(header.shape) * _bits(header.dtype) // 8)


@cache
def _bits(dtype: str) -> int:
    found = re.search(r"\d+", dtype)  # F8_E4M3, BF16, F6_E2M3: the first number is the width; BOOL has none
    return int(found[0]) if found else 8


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
