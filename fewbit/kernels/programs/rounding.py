"""Steps of rounding inside a program: from numbers in registers to their extremes, to scales, to codes.

Bit for bit what `numerics.quantize` gives. Quotients are correctly rounded; numbers are clamped before they are rounded
to nearest, ties to even, by adding and taking away a large number of the right binade, so that the cast to a narrow
float at the end is exact.
"""

from __future__ import annotations

import triton
from triton import language as tl


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
    lower = words << 16
    most = tl.maximum(greatest(tl.maximum(words, lower)), 0)
    unsigned = tl.maximum(words.to(tl.uint32, bitcast=True), lower.to(tl.uint32, bitcast=True))
    least = tl.minimum(greatest(unsigned).to(tl.int32, bitcast=True), 0)
    return in_upper_half(least, DTYPE), in_upper_half(most, DTYPE)


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
