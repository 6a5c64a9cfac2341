"""Activations to codes or to the 16-bit numbers that they stand for: by token, by a known scale, or by group.

Bit for bit what `numerics.quantize` gives. Quotients are correctly rounded; numbers are clamped before they are rounded
to nearest, ties to even, by adding and taking away a large number of the right binade, so that the cast to a narrow
float at the end is exact. The numbers of E4M3, of E2M1 and of integers of up to 8 bits are exact in bf16 and f16.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fewbit.kernels.activation.producer import Producer
from fewbit.kernels.activation.rounding import Rounding
from fewbit.kernels.programs.device import INTERPRETED, chains
from fewbit.spec.element import F32

GROUPED_BLOCK = 1024
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
        x: [M, K], each row contiguous, not empty.
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
    whole_rows = not grouped or (producer is not None and producer.kind == "normed")
    block = max(rounding.group, triton.next_power_of_2(width)) if whole_rows else GROUPED_BLOCK
    chained = chains(x.device)
    constants = {"launch_pdl": True} if chained else {}
    other = x if producer is None else producer.other
    kind, epsilon = (producer.kind, producer.epsilon) if producer else ("plain", 0.0)
    round_rows[(tokens, triton.cdiv(width, block))](
        x, other, x.stride(0), other.stride(0) if other.dim() > 1 else 0, epsilon,
        codes, scales, scales if zero is None else zero, static.get("input_global_scale", scales),
        tokens, columns, width, rounding.divisor, rounding.low, rounding.high, F32.smallest_positive,
        PRODUCER=kind, KIND=rounding.kind, GROUP=rounding.group, SCALE_KIND=rounding.scale_kind,
        EXPONENT=rounding.largest_exponent, CARRY=rounding.carry,
        DYNAMIC=rounding.dynamic, ZEROS=zero is not None, AS_NUMBERS=as_numbers, OFFSET=rounding.offset, BLOCK=block,
        CHAINED=chained, FUSED=not INTERPRETED, num_warps=min(16, max(1, block // 512)), **constants,
    )  # fmt: skip
    return codes, scales, zero


@triton.jit
def quotients(numbers, scale, FUSED: tl.constexpr):
    """numbers [R, C] / scale [R], correctly rounded.

    With fused multiply-adds by Markstein's steps: from a correctly rounded reciprocal, two corrections by the exact
    remainder give the correctly rounded quotient in half the instructions of a division. Where the scale is so small
    that a remainder would underflow, both sides are first multiplied by a power of two.
    """
    if FUSED:
        raised = tl.where(scale < 1e-25, 1.0633823966279327e37, 1.0)  # 2**123
        divisor = scale * raised
        reciprocal = tl.div_rn(1.0 + tl.zeros_like(divisor), divisor)[:, None] + tl.zeros_like(numbers)
        negative = tl.zeros_like(numbers) - divisor[:, None]
        dividend = numbers * raised[:, None]
        quotient = dividend * reciprocal
        quotient = tl.fma(tl.fma(negative, quotient, dividend), reciprocal, quotient)
        return tl.fma(tl.fma(negative, quotient, dividend), reciprocal, quotient)
    else:
        return tl.div_rn(numbers, scale[:, None] + tl.zeros_like(numbers))


@triton.jit
def nearest(numbers, KIND: tl.constexpr):
    """Clamped numbers rounded to the element's, ties to even; zeros keep their sign."""
    bits = numbers.to(tl.int32, bitcast=True)
    if KIND == "integer":
        large = 12582912.0 + tl.zeros_like(numbers)  # 1.5 * 2**23
    else:
        binade = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        if KIND == "e4m3":
            large = tl.maximum(binade, 0.015625) * 1572864.0  # its smallest binade, 1.5 * 2**20
        else:
            large = tl.maximum(binade, 1.0) * 6291456.0  # its smallest binade, 1.5 * 2**22
    rounded = (numbers + large) - large
    if KIND == "integer":
        return rounded
    else:
        return (rounded.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_pairs(numbers, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Bytes [ROWS, SIZE / 2] of E2M1 numbers [ROWS, SIZE]."""
    bits = numbers.to(tl.int32, bitcast=True)
    # From one on, exponent and first bit of the mantissa, counted from one; below, halves.
    magnitude = tl.where(
        (bits & 0x7FFFFFFF) >= 0x3F800000, ((bits >> 22) & 511) - 252, (tl.abs(numbers) * 2).to(tl.int32)
    )
    first, second = tl.split(tl.reshape(((bits >> 28) & 8) | magnitude, (ROWS, SIZE // 2, 2)))
    return (first | (second << 4)).to(tl.uint8)


@triton.jit
def float_scale(extreme, divisor, smallest):
    """The scale that brings the extreme to the divisor; one for zero."""
    scale = tl.maximum(tl.div_rn(extreme, divisor + tl.zeros_like(extreme)), tl.cast(smallest, tl.float32))
    return tl.where(extreme > 0, scale, 1.0)


@triton.jit
def group_scales(
    extreme, divisor, smallest, tensor_scale, SCALE_KIND: tl.constexpr, EXPONENT: tl.constexpr, CARRY: tl.constexpr
):
    """Scales of groups as their element holds them, and times the scale of the tensor."""
    if SCALE_KIND == "f32":
        scale = float_scale(extreme, divisor, smallest)
        return scale, scale
    elif SCALE_KIND == "e8m0":
        exponent = ((extreme.to(tl.int32, bitcast=True) + CARRY) >> 23) - EXPONENT
        exponent = tl.where(extreme > 0, tl.minimum(tl.maximum(exponent, 0), 254), 127)
        # 2**(exponent - 127); the one below the smallest normal number is made as a subnormal.
        scale = tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
        return scale, scale
    else:
        factor = tl.load(tensor_scale)
        quotient = tl.div_rn(extreme, divisor + tl.zeros_like(extreme)) * (1.0 / factor).to(tl.float32)
        bounded = tl.minimum(tl.maximum(quotient, 0.001953125), 448.0)
        scale = nearest(tl.where(quotient > 0, bounded, 1.0), "e4m3")
        return scale, (scale.to(tl.float64) * factor).to(tl.float32)


@triton.jit
def rounded_to(numbers, DTYPE: tl.constexpr, FUSED: tl.constexpr):
    """float32 numbers that the dtype holds; Triton's interpreter cuts bf16 off instead of rounding."""
    if FUSED or DTYPE != tl.bfloat16:
        return numbers.to(DTYPE).to(tl.float32)
    else:
        bits = numbers.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def produced(
    numbers, other, columns, epsilon, PRODUCER: tl.constexpr, DTYPE: tl.constexpr, FUSED: tl.constexpr
):  # fmt: skip
    """What a producer makes of part of a row [R, C], or of all of it for a norm, each step rounded to the dtype."""
    if PRODUCER == "gated":
        activated = numbers / (1.0 + tl.exp(-numbers))
    else:
        mean = tl.sum(tl.sum(numbers * numbers, axis=1), axis=0) / columns
        activated = numbers * tl.rsqrt(mean + epsilon)
    return rounded_to(rounded_to(activated, DTYPE, FUSED) * other, DTYPE, FUSED)


@triton.jit
def store_codes(
    codes, rounded, row, place, width, KIND: tl.constexpr, AS_NUMBERS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores what numbers at `place` [BLOCK / SIZE, SIZE] of a row were rounded to, in the codes' dtype or in pairs."""
    if KIND == "e2m1" and not AS_NUMBERS:
        half = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // SIZE)[:, None] * (SIZE // 2)
        half += tl.arange(0, SIZE // 2)[None, :]
        pairs = e2m1_pairs(rounded, BLOCK // SIZE, SIZE)
        tl.store(codes + row * (width // 2) + half, pairs, mask=half < width // 2)
    elif KIND == "integer" and not AS_NUMBERS:
        # The integer is in the lowest bits of its sum with 1.5 * 2**23; a conversion takes eight times as long.
        stored = (rounded + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        tl.store(codes + row * width + place, stored, mask=place < width)
    else:
        tl.store(codes + row * width + place, rounded.to(codes.dtype.element_ty), mask=place < width)


@triton.jit
def round_rows(
    x, other, x_stride, other_stride, epsilon,
    codes, scales, zeros, tensor_scale, tokens, columns, width, divisor, low, high, smallest,
    PRODUCER: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_KIND: tl.constexpr, EXPONENT: tl.constexpr,
    CARRY: tl.constexpr, DYNAMIC: tl.constexpr,
    ZEROS: tl.constexpr, AS_NUMBERS: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
    FUSED: tl.constexpr,
):  # fmt: skip
    """`BLOCK` numbers of one row."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = GROUP if GROUP > 0 else BLOCK
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK // SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    numbers = tl.load(x + row * x_stride + place, mask=place < columns, other=0.0).to(tl.float32)
    if PRODUCER != "plain":
        factors = tl.load(other + row * other_stride + place, mask=place < columns, other=0.0).to(tl.float32)
        numbers = produced(numbers, factors, columns, epsilon, PRODUCER, x.dtype.element_ty, FUSED)
    factor = tl.full((BLOCK // SIZE,), 1.0, tl.float32)
    shift = tl.zeros((BLOCK // SIZE,), tl.float32)
    if GROUP > 0:
        groups = tl.program_id(1) * (BLOCK // SIZE) + tl.arange(0, BLOCK // SIZE)
        factor, scale = group_scales(
            tl.max(tl.abs(numbers), axis=1), divisor, smallest, tensor_scale, SCALE_KIND, EXPONENT, CARRY
        )
        tl.store(scales + groups.to(tl.int64) * tokens + row, factor, mask=groups < tl.cdiv(width, GROUP))
    elif ZEROS and DYNAMIC:
        least = tl.minimum(tl.min(numbers, axis=1), 0.0)
        scale = float_scale(tl.maximum(tl.max(numbers, axis=1), 0.0) - least, divisor, smallest)
        shift = nearest(tl.minimum(tl.maximum(low - tl.div_rn(least, scale), low), high), "integer")
        tl.store(scales + row + tl.zeros_like(scale).to(tl.int32), scale)
        tl.store(zeros + row + tl.zeros_like(scale).to(tl.int32), shift - OFFSET)
    elif DYNAMIC:
        scale = float_scale(tl.max(tl.abs(numbers), axis=1), divisor, smallest)
        tl.store(scales + row + tl.zeros_like(scale).to(tl.int32), scale)
    else:
        scale = tl.load(scales) + tl.zeros_like(factor)
        if ZEROS:
            shift += tl.load(zeros) + OFFSET
    quotient = quotients(numbers, scale, FUSED)
    if ZEROS:
        quotient += shift[:, None]
    rounded = tl.minimum(tl.maximum(quotient, low), high)
    if AS_NUMBERS or not (FUSED and KIND == "e4m3"):  # else the cast rounds, to the same
        rounded = nearest(rounded, KIND)
    if AS_NUMBERS:
        rounded -= shift[:, None]
        if SCALE_KIND != "f32":
            rounded *= factor[:, None]
    else:
        rounded = tl.where(place < columns, rounded - OFFSET, 0.0)
    store_codes(codes, rounded, row, place, width, KIND, AS_NUMBERS, SIZE, BLOCK)
