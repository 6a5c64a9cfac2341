"""Activations to codes or to the 16-bit numbers that they stand for: by token, by a known scale, or by group.

Bit for bit what `numerics.quantize` gives. Quotients are correctly rounded; numbers are clamped before they are rounded
to nearest, ties to even, by adding and taking away a large number of the right binade, so that the cast to a narrow
float at the end is exact. The numbers of E4M3, of E2M1 and of integers of up to 8 bits are exact in bf16 and f16.
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
from fewbit.spec.element import F32

_CODES = {"integer": torch.int8, "e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8}


def quantized(
    x: Tensor, rounding: Rounding, static: dict[str, Tensor], width: int, as_numbers: bool,
    producer: Producer | None = None,
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
    """
    tokens, columns = x.shape
    in_pairs = rounding.kind == "e2m1" and not as_numbers
    codes = x.new_empty(tokens, width // (1 + in_pairs), dtype=x.dtype if as_numbers else _CODES[rounding.kind])
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
def reciprocals(scale, SCALE_KIND: tl.constexpr, FUSED: tl.constexpr):
    """What `quotients` needs of a scale: a power of two, the scale times it, and one over that, correctly rounded.

    The power keeps remainders from underflowing.
    """
    exponent = scale.to(tl.int32, bitcast=True) >> 23
    if SCALE_KIND == "e8m0":  # a power of two has an exact reciprocal
        return scale, scale, tl.where(exponent < 254, (254 - exponent) << 23, 1 << 22).to(tl.float32, bitcast=True)
    elif FUSED:
        raised = tl.where(exponent < 44, 1.8446744073709552e19, tl.where(exponent > 210, 5.421010862427522e-20, 1.0))
        divisor = scale * raised
        return raised, divisor, tl.div_rn(1.0 + tl.zeros_like(divisor), divisor)
    else:
        return scale, scale, scale


@triton.jit
def quotients(numbers, raised, divisor, reciprocal, BOUND: tl.constexpr, SCALE_KIND: tl.constexpr, FUSED: tl.constexpr):
    """16-bit floats / scale, correctly rounded, but beyond a bound only beyond it; and numbers of their sign.

    With fused multiply-adds by Markstein's step: a product with the correctly rounded reciprocal, corrected once by its
    exact excess. That this gives the correctly rounded quotient was tried for every significand of a float32 under
    every one of a bf16 and of an f16. Taking the excess, not the remainder, keeps the sign of a zero.
    """
    if SCALE_KIND == "e8m0":
        quotient = numbers * reciprocal
        return quotient, quotient
    elif FUSED:
        dividend = numbers * raised
        quotient = dividend * reciprocal
        if BOUND > 0:  # an infinite quotient has no excess
            quotient = tl.minimum(tl.maximum(quotient, -BOUND), BOUND)
        excess = tl.fma(quotient, divisor + tl.zeros_like(quotient), dividend * -1.0)
        return tl.fma(excess, reciprocal * -1.0 + tl.zeros_like(quotient), quotient), dividend
    else:
        quotient = tl.div_rn(numbers, divisor + tl.zeros_like(numbers))
        return quotient, quotient


@triton.jit
def nearest(numbers, KIND: tl.constexpr):
    """Clamped numbers rounded to the element's, ties to even; those of floats must not be negative."""
    if KIND == "integer":
        large = 12582912.0 + tl.zeros_like(numbers)  # 1.5 * 2**23
        return (numbers + large) - large
    else:
        binade = (numbers.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        if KIND == "e4m3":
            binade = tl.maximum(binade, 0.015625)  # its smallest
            large = 1572864.0 + tl.zeros_like(numbers)  # 1.5 * 2**20
        else:
            binade = tl.maximum(binade, 1.0)
            large = 6291456.0 + tl.zeros_like(numbers)  # 1.5 * 2**22
        return tl.fma(binade, large * -1.0, tl.fma(binade, large, numbers))


@triton.jit
def nearest_signed(quotient, signed, high, KIND: tl.constexpr):
    """Quotients clamped and rounded to a float's numbers, under the sign of others; zeros have one, too.

    A quotient may be NaN where it was infinite: a minimum then takes its other side.
    """
    magnitude = nearest(tl.minimum(tl.abs(quotient), high), KIND)
    sign = signed.to(tl.int32, bitcast=True) & -2147483648
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_bits(numbers):
    """Codes of E2M1 numbers, int32."""
    bits = numbers.to(tl.int32, bitcast=True)
    # From one on, exponent and first bit of the mantissa, counted from one; below, halves.
    magnitude = tl.where(
        (bits & 0x7FFFFFFF) >= 0x3F800000, ((bits >> 22) & 511) - 252, (tl.abs(numbers) * 2).to(tl.int32)
    )
    return ((bits >> 28) & 8) | magnitude


@triton.jit
def in_words(numbers, UNITS: tl.constexpr, PIECES: tl.constexpr, PART: tl.constexpr):
    """int32 [UNITS, PIECES, PART / 2] of two numbers of 16 bits each, which is how registers hold them: no work.

    Rows wait in registers while their scale is sought; taken apart before, they would need twice as many.
    """
    bits = numbers.to(tl.int16, bitcast=True)
    first, second = tl.split(tl.reshape(bits, (UNITS, PIECES, PART // 2, 2)))
    return (first.to(tl.int32) & 0xFFFF) | (second.to(tl.int32) << 16)


@triton.jit
def in_upper_half(words, DTYPE: tl.constexpr):
    """The float32 of a number of 16 bits in the upper half of a word, whatever the lower half holds."""
    if DTYPE == tl.bfloat16:
        return (words & -65536).to(tl.float32, bitcast=True)
    else:
        return (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def greatest(values):
    """[UNITS, 1, 1] of [UNITS, PIECES, PART / 2]."""
    return tl.max(tl.max(values, axis=1, keep_dims=True), axis=2, keep_dims=True)


@triton.jit
def largest_magnitude(words, DTYPE: tl.constexpr):
    """float32 [UNITS, 1, 1]. Floats without their sign are in the order of their bits."""
    upper, lower = (words << 1).to(tl.uint32, bitcast=True), (words << 17).to(tl.uint32, bitcast=True)
    return in_upper_half((greatest(tl.maximum(upper, lower)) >> 1).to(tl.int32, bitcast=True), DTYPE)


@triton.jit
def range_with_zero(words, DTYPE: tl.constexpr):
    """The least and the largest of numbers and zero, float32 [UNITS, 1, 1] each.

    As integers, numbers from zero on are in their own order and above negative ones; without a sign, negative ones are
    above them, those of larger magnitude higher.
    """
    upper, lower = words >> 16, words.to(tl.int16).to(tl.int32)
    most = tl.maximum(greatest(tl.maximum(upper, lower)), 0)
    unsigned = tl.maximum(upper.to(tl.uint32, bitcast=True), lower.to(tl.uint32, bitcast=True))
    least = tl.minimum(greatest(unsigned).to(tl.int32, bitcast=True), 0)
    return in_upper_half(least << 16, DTYPE), in_upper_half(most << 16, DTYPE)


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
    numbers, factors, columns, epsilon, PRODUCER: tl.constexpr, DTYPE: tl.constexpr, UNITS: tl.constexpr,
    PIECES: tl.constexpr, PART: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """What a producer makes of parts of rows, or of all of one row for a norm, each step rounded to the dtype."""
    if PRODUCER == "gated":
        numbers = numbers.to(tl.float32)
        if FUSED:  # without what would treat quotients and powers too small for bf16
            activated = libdevice.fast_dividef(numbers, 1.0 + libdevice.fast_expf(numbers * -1.0))
        else:
            activated = numbers / (1.0 + tl.exp(-numbers))
    else:
        words = in_words(numbers, UNITS, PIECES, PART)
        numbers = numbers.to(tl.float32)
        mean = tl.sum(tl.sum(tl.sum(numbers * numbers, axis=2), axis=1), axis=0) / columns
        numbers = tl.join(in_upper_half(words << 16, DTYPE), in_upper_half(words, DTYPE))
        activated = tl.reshape(numbers, (UNITS, PIECES, PART)) * tl.rsqrt(mean + epsilon)
    return rounded_to(rounded_to(activated, DTYPE, FUSED) * factors.to(tl.float32), DTYPE, FUSED).to(DTYPE)


@triton.jit
def codes_of(
    numbers, raised, divisor, reciprocal, shift, factor, low, high, KIND: tl.constexpr, SCALE_KIND: tl.constexpr,
    ZEROS: tl.constexpr, AS_NUMBERS: tl.constexpr, OFFSET: tl.constexpr, BOUND: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Codes of the numbers, as integers or as floats that their dtype holds after a cast; or what they stand for."""
    rounded, signed = quotients(numbers, raised, divisor, reciprocal, BOUND, SCALE_KIND, FUSED)
    if KIND == "integer":
        if ZEROS:
            rounded += shift
        if BOUND > 0 or ZEROS:  # else their scale keeps quotients above
            rounded = tl.maximum(rounded, low)
        rounded = tl.minimum(rounded, high)
        if AS_NUMBERS:
            rounded = nearest(rounded, KIND) - shift
        else:
            # The integer is in the lowest bits of its sum with 1.5 * 2**23; a conversion takes eight times as long.
            rounded = (rounded + (12582912.0 - OFFSET)).to(tl.int32, bitcast=True)
    elif AS_NUMBERS or KIND == "e2m1" or not FUSED:  # else the cast clamps and rounds, to the same
        rounded = nearest_signed(rounded, signed, high, KIND)
    if AS_NUMBERS and SCALE_KIND != "f32":
        rounded *= factor
    return rounded


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
        numbers = produced(numbers, factors, columns, epsilon, PRODUCER, DTYPE, UNITS, PIECES, PART, FUSED)
    words = in_words(numbers, UNITS, PIECES, PART)
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
