"""Quantized layers of every kind, for tests that hold for every format."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from fewbit.checkpoints.dtypes import header_of
from fewbit.checkpoints.interface import TensorHeader
from fewbit.numerics import QuantizedTensor, quantize
from fewbit.spec import PRESETS, LinearKey

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
        )
    },
}

SHAPE = (256, 256)
"""Every key fits it, and so do two halves along either axis."""


def layer(key: LinearKey, shape: tuple[int, int] = SHAPE) -> QuantizedTensor:
    """A random layer quantized by `key`, with the static activation tensors that the key asks for.

    Second-level scales are powers of two, which files keep exactly whether they store a multiplier or a divisor.
    """
    shared = torch.full((1, 1), 2.0**-9, dtype=torch.float64) if key.weight.global_scale else None
    record = quantize(torch.randn(shape), key.weight, global_scale=shared)
    activation = key.activation
    if activation is None:
        return record
    if activation.global_scale and not activation.global_scale.dynamic:
        return record.with_tensors(input_global_scale=torch.tensor(2.0**-7, dtype=torch.float64))
    if activation.is_dynamic:
        return record
    record = record.with_tensors(input_scale=torch.rand(()))
    return record if activation.symmetric else record.with_tensors(input_zero_point=torch.tensor(-3, dtype=torch.int8))


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
