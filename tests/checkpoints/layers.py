"""Quantized layers of every kind, for tests that hold for every format."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from fewbit.checkpoints.dtypes import header_of
from fewbit.checkpoints.interface import TensorHeader
from fewbit.numerics import QuantizedTensor, code_dtype, quantize
from fewbit.numerics.codebooks import CODEBOOKS
from fewbit.spec import PRESETS, LinearKey, QuantKey

_TOKEN_INT8 = "int8:token:f32:dynamic"
_TOKEN_FP8 = "e4m3:token:f32:dynamic"

KEYS: dict[str, LinearKey] = {
    **{name: scheme.rules[0].key for name, scheme in PRESETS.items()},
    **{
        text: LinearKey.parse(text)
        for text in (
            *(f"int{bits}:group32:f32" for bits in range(2, 9)),
            *(f"int{bits}:asym:group64:f16" for bits in range(2, 9)),
            "int4:channel:bf16",
            "int4:asym:channel:f32",
            "int8:tensor:f32",
            "int8:asym:tensor:f32",
            f"int4:group64:bf16 * {_TOKEN_INT8}",
            f"int4:asym:group32:f16 * {_TOKEN_INT8}",
            f"int8:channel:f32 * {_TOKEN_FP8}",
            "int8:channel:bf16 * int8:tensor:f32",
            "int8:channel:bf16 * int8:asym:tensor:f32",
            "e4m3:tensor:f32",
            "e4m3:channel:bf16",
            "e4m3:block64x32:f32",
            f"e4m3:tensor:f32 * {_TOKEN_FP8}",
            f"e4m3:channel:f32 * {_TOKEN_FP8}",
            "e4m3:tensor:f32 * e4m3:tensor:f32",
            "e4m3:block64x64:f32 * e4m3:group64:f32:dynamic",
            "e4m3:block128x128:e8m0 * e4m3:group128:f32:dynamic",
            "e4m3:group32:e8m0",
            "e2m3:group32:e8m0",
            "e2m3:group32:e8m0 * e4m3:group32:e8m0:dynamic",
            "e2m1:group32:e8m0 * e4m3:group128:f32:dynamic",
            "e2m1:channel:f16",
            "e3m2:group64:bf16",
            "e5m2:channel:f32",
            "e2m3:group64:e5m2",
            "int4:channel:f32/tensor:f32",
            "int3:group64:f16/channel:f32",
            "int4:group64:e4m3/tensor:f32",
            "int8:group64:bf16 * e4m3:group128:e8m0:dynamic",
            "uint4:group64:f32",  # codes into a codebook
            *(f"uint{bits}:asym:group64:bf16" for bits in (1, 2, 3, 4, 5, 8)),  # float zero points
            "uint4:asym:channel:f32",
        )
    },
}

SHAPE = (256, 256)
"""Every key fits it, and so do two halves along either axis."""

POWER_OF_TWO = 2.0**-9
"""A second-level scale, which files keep exactly whether they store a multiplier or a divisor."""


def layer(key: LinearKey, shape: tuple[int, int] = SHAPE) -> QuantizedTensor:
    """A random layer quantized by `key`, with the static activation tensors that the key asks for."""
    record = _weight(key.weight, shape)
    activation = key.activation
    if activation is None:
        return record
    if activation.global_scale and not activation.global_scale.dynamic:
        return record.with_tensors(input_global_scale=torch.tensor(POWER_OF_TWO, dtype=torch.float64))
    if activation.is_dynamic:
        return record
    record = record.with_tensors(input_scale=torch.rand(()))
    return record if activation.symmetric else record.with_tensors(input_zero_point=torch.tensor(-3, dtype=torch.int8))


def _weight(key: QuantKey, shape: tuple[int, int]) -> QuantizedTensor:
    if key.element.is_integer and not key.element.signed:
        return _unsigned(key, shape)
    if key.global_scale is None:
        return quantize(torch.randn(shape), key)
    second = torch.full(key.global_scale.granularity.scale_shape(shape), POWER_OF_TWO, dtype=torch.float64)
    return quantize(torch.randn(shape), key, global_scale=second)


def _unsigned(key: QuantKey, shape: tuple[int, int]) -> QuantizedTensor:
    """Codes into NF4's codebook, or codes with zero points between them."""
    scale_shape = key.granularity.scale_shape(shape)
    codes = torch.randint(0, 1 << key.element.bits, shape, dtype=torch.uint8)
    roles = {"codes": codes, "scale": (torch.rand(scale_shape) + 0.1).to(code_dtype(key.scale.element))}
    if key.symmetric:
        roles["codebook"] = torch.tensor(CODEBOOKS["nf4"])
    else:
        roles["zero_point"] = (torch.rand(scale_shape) * key.element.max).to(code_dtype(key.scale.element))
    return QuantizedTensor(key, shape, roles)


def headers(tensors: Mapping[str, Tensor]) -> dict[str, TensorHeader]:
    return {name: header_of(tensor) for name, tensor in tensors.items()}


def sha256(numbers: Tensor) -> str:
    """Of float32 numbers in row-major order, minus zero written as zero, as tiny checkpoints state it."""
    return hashlib.sha256((numbers + 0.0).contiguous().numpy().astype("<f4").tobytes()).hexdigest()


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal dtype, shape and bytes; NaN equals itself and -0.0 differs from 0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    # One number may have any stride, with which torch will not view it as bytes.
    first, second = (tensor.flatten().clone().as_strided((tensor.numel(),), (1,)) for tensor in (left, right))
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
