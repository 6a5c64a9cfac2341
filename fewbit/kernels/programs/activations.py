"""Activations to codes or to the 16-bit numbers that they stand for: by token, by a known scale, or by group.

The steps are in `rounding.py`. The numbers of E4M3, of E2M1 and of integers of up to 8 bits are exact in bf16 and f16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fewbit.kernels.activation.producer import Producer
from fewbit.kernels.activation.rounding import Rounding
from fewbit.kernels.programs.device import INTERPRETED, chains
from fewbit.kernels.programs.rounding import (
    codes_of,
    e2m1_bits,
    float_scale,
    group_scales,
    in_upper_half,
    in_words,
    largest_magnitude,
    nearest,
    range_with_zero,
    reciprocals,
)
from fewbit.spec.element import F32

_CODES = {"integer": torch.int8, "e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8}


def quantized(
    x: Tensor, rounding: Rounding, static: dict[str, Tensor], width: int, as_numbers: bool,
    producer: Producer | None = None, rows: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Codes [M, width] of x [M, K] (zeros from K on), float32 scales, and float32 zero points [M] or [] or None.

    E2M1 codes come in pairs, uint8 [M, width / 2], the first in the lower half. Scales are [M], or [groups, M] without
    the scale of the tensor, or the given `input_scale` itself. As numbers, codes come in x's dtype, zero points taken
    away and scales of groups other than f32 multiplied in, which is exact in bf16.

    Args:
        x: [M, K], bf16 or f16, each row contiguous, not empty.
        rounding: see `Rounding`.
        static: `input_scale` float32 [], `input_zero_point` float32 [], `input_global_scale` float64 [], as the key
            has them.
        width: at least K.
        as_numbers: numbers of x's dtype instead of codes.
        producer: what is rounded instead of x itself.
        rows: of the codes where these are more than M; the others are not written.
    """
    tokens, columns = x.shape
    in_pairs = rounding.kind == "e2m1" and not as_numbers
    dtype = x.dtype if as_numbers else _CODES[rounding.kind]
    codes = x.new_empty(max(tokens, rows), width // (1 + in_pairs), dtype=dtype)
    grouped = rounding.group > 0
    if grouped:
        scales = x.new_empty(-(-width // rounding.group), tokens, dtype=torch.float32)
    else:
        scales = x.new_empty(tokens, dtype=torch.float32) if rounding.dynamic else static["input_scale"]
    zero = None if rounding.symmetric else static.get("input_zero_point")
    if zero is None and not rounding.symmetric:
        zero = torch.empty_like(scales)
    shape = shape_of(rounding, tokens, width, producer.kind if producer else "plain")
    chained = chains(x.device)
    constants = {"launch_pdl": True} if chained else {}
    other = x if producer is None else producer.other
    kind, epsilon = (producer.kind, producer.epsilon) if producer else ("plain", 0.0)
    round_rows[(triton.cdiv(tokens, shape.rows), triton.cdiv(width, shape.block))](
        x, other, x.stride(0), other.stride(0) if other.dim() > 1 else 0, epsilon,
        codes, scales, scales if zero is None else zero, static.get("input_global_scale", scales),
        tokens, columns, width, rounding.divisor, rounding.low, rounding.high, F32.smallest_positive,
        PRODUCER=kind, KIND=rounding.kind, GROUP=rounding.group, SCALE_KIND=rounding.scale_kind,
        EXPONENT=rounding.largest_exponent, CARRY=rounding.carry,
        DYNAMIC=rounding.dynamic, ZEROS=zero is not None, AS_NUMBERS=as_numbers, OFFSET=rounding.offset,
        BOUND=_bound(rounding), PADDED=width > columns, ROWS=shape.rows, BLOCK=shape.block, PIECES=shape.pieces,
        CHAINED=chained,
        FUSED=not INTERPRETED, num_warps=shape.warps, **constants,
    )  # fmt: skip
    return codes, scales, zero


@dataclass(frozen=True)
class Shape:
    """What one program rounds: a block of numbers of each of some rows.

    Attributes:
        pieces: into how many pieces the numbers under a scale are cut, all of which one thread holds.
    """

    rows: int
    block: int
    pieces: int
    warps: int


def shape_of(rounding: Rounding, tokens: int, width: int, producer: str) -> Shape:
    """The shape of programs for rows of so many numbers: whole ones where a scale or a norm needs them.

    Measured on an H200, see `benchmarks/roundings.py`. That of a norm, whose sum depends on it, is the same for any
    number of tokens.
    """
    if (not rounding.group and rounding.dynamic) or producer == "normed":
        block = max(rounding.group, triton.next_power_of_2(width))
        most, each = (16, 512) if producer == "gated" else (8, 1024)
        return Shape(1, block, 1, min(most, max(1, block // each)))
    rows = 8 if tokens >= 8 else 1
    if rounding.kind == "e2m1":
        return Shape(rows, 256, 2, 4 if rows > 1 else 1)
    block = 256 if producer == "gated" else 512
    return Shape(rows, block, 1, 4 if rows > 1 else 1)


def _bound(rounding: Rounding) -> float:
    """What quotients are held within so that they are finite; 0 where the scale sees to it, or their rounding."""
    sees_to_it = (rounding.dynamic and rounding.scale_kind == "f32") or rounding.scale_kind == "e8m0"
    return 0.0 if sees_to_it or rounding.kind == "e2m1" else 4096.0


@triton.jit
def rounded_to(numbers, DTYPE: tl.constexpr, FUSED: tl.constexpr):
    """float32 numbers that the dtype holds; Triton's interpreter cuts bf16 off instead of rounding."""
    if FUSED or DTYPE != tl.bfloat16:
        return numbers.to(DTYPE).to(tl.float32)
    else:
        bits = numbers.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def produced(numbers, factors, columns, epsilon, PRODUCER: tl.constexpr, DTYPE: tl.constexpr, FUSED: tl.constexpr):
    """What a producer makes of parts of rows, or of all of one row for a norm, each step rounded to the dtype."""
    numbers = numbers.to(tl.float32)
    if PRODUCER == "gated":
        if FUSED:  # without what would treat quotients and powers too small for bf16
            activated = libdevice.fast_dividef(numbers, 1.0 + libdevice.fast_expf(numbers * -1.0))
        else:
            activated = numbers / (1.0 + tl.exp(-numbers))
    else:
        mean = tl.sum(tl.sum(tl.sum(numbers * numbers, axis=2), axis=1), axis=0) / columns
        activated = numbers * tl.rsqrt(mean + epsilon)
    return rounded_to(rounded_to(activated, DTYPE, FUSED) * factors.to(tl.float32), DTYPE, FUSED).to(DTYPE)


@triton.jit
def scales_of(
    words, row, group, inside, scales, zeros, tensor_scale, tokens, width, divisor, low, high, smallest,
    DTYPE: tl.constexpr, GROUP: tl.constexpr, SCALE_KIND: tl.constexpr, EXPONENT: tl.constexpr, CARRY: tl.constexpr,
    DYNAMIC: tl.constexpr, ZEROS: tl.constexpr, OFFSET: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """What units are divided by, the same without the scale of the tensor, and codes of zero; stores what is new."""
    factor = tl.full((UNITS, 1, 1), 1.0, tl.float32)
    shift = tl.zeros((UNITS, 1, 1), tl.float32)
    if GROUP > 0:
        extreme = largest_magnitude(words, DTYPE)
        factor, scale = group_scales(extreme, divisor, smallest, tensor_scale, SCALE_KIND, EXPONENT, CARRY)
        held = inside & (group < tl.cdiv(width, GROUP))
        tl.store(scales + group.to(tl.int64) * tokens + row, factor, mask=held)
    elif ZEROS and DYNAMIC:
        least, most = range_with_zero(words, DTYPE)
        scale = float_scale(most - least, divisor, smallest)
        shift = nearest(tl.minimum(tl.maximum(low - tl.div_rn(least, scale), low), high), "integer")
        tl.store(scales + row, scale, mask=inside)
        tl.store(zeros + row, shift - OFFSET, mask=inside)
    elif DYNAMIC:
        scale = float_scale(largest_magnitude(words, DTYPE), divisor, smallest)
        tl.store(scales + row, scale, mask=inside)
    else:
        scale = tl.load(scales) + tl.zeros_like(factor)
        if ZEROS:
            shift += tl.load(zeros) + OFFSET
    return scale, factor, shift


@triton.jit
def round_rows(
    x, other, x_stride, other_stride, epsilon,
    codes, scales, zeros, tensor_scale, tokens, columns, width, divisor, low, high, smallest,
    PRODUCER: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_KIND: tl.constexpr, EXPONENT: tl.constexpr,
    CARRY: tl.constexpr, DYNAMIC: tl.constexpr, ZEROS: tl.constexpr, AS_NUMBERS: tl.constexpr, OFFSET: tl.constexpr,
    BOUND: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    CHAINED: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """`BLOCK` numbers of each of `ROWS` rows, as units under one scale in pieces: [UNITS, PIECES, PART].

    Units of the same group of several rows are side by side, as their scales are stored.
    """
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    DTYPE: tl.constexpr = x.dtype.element_ty
    SIZE: tl.constexpr = GROUP if GROUP > 0 else BLOCK
    PART: tl.constexpr = SIZE // PIECES
    UNITS: tl.constexpr = ROWS * BLOCK // SIZE
    unit = tl.arange(0, UNITS)[:, None, None]
    row = tl.program_id(0) * ROWS + unit % ROWS
    group = tl.program_id(1) * (BLOCK // SIZE) + unit // ROWS
    start = row.to(tl.int64)
    begin = group * SIZE + tl.arange(0, PIECES)[None, :, None] * PART
    place = begin + tl.arange(0, PART)[None, None, :]
    inside = row < tokens
    read = inside & (place < columns)
    numbers = tl.load(x + start * x_stride + place, mask=read, other=0.0)
    if PRODUCER != "plain":
        factors = tl.load(other + start * other_stride + place, mask=read, other=0.0)
        numbers = produced(numbers, factors, columns, epsilon, PRODUCER, DTYPE, FUSED)
    words = in_words(numbers, UNITS, PIECES, PART)
    scale, factor, shift = scales_of(
        words, row, group, inside, scales, zeros, tensor_scale, tokens, width, divisor, low, high, smallest, DTYPE,
        GROUP, SCALE_KIND, EXPONENT, CARRY, DYNAMIC, ZEROS, OFFSET, UNITS,
    )  # fmt: skip
    raised, by, reciprocal = reciprocals(scale, SCALE_KIND, FUSED)
    first = codes_of(
        in_upper_half(words << 16, DTYPE), raised, by, reciprocal, shift, factor, low, high, KIND, SCALE_KIND,
        ZEROS, AS_NUMBERS, OFFSET, BOUND, FUSED,
    )  # fmt: skip
    second = codes_of(
        in_upper_half(words, DTYPE), raised, by, reciprocal, shift, factor, low, high, KIND, SCALE_KIND,
        ZEROS, AS_NUMBERS, OFFSET, BOUND, FUSED,
    )  # fmt: skip
    if KIND == "e2m1" and not AS_NUMBERS:
        half = begin // 2 + tl.arange(0, PART // 2)[None, None, :]
        pairs = (e2m1_bits(first) | (e2m1_bits(second) << 4)).to(tl.uint8)
        tl.store(codes + start * (width // 2) + half, pairs, mask=inside & (half < width // 2))
    else:
        rounded = tl.reshape(tl.join(first, second), (UNITS, PIECES, PART))
        if KIND == "integer" and ZEROS and PADDED and not AS_NUMBERS:
            rounded = tl.where(place < columns, rounded, 0)
        tl.store(codes + start * width + place, rounded.to(codes.dtype.element_ty), mask=inside & (place < width))
