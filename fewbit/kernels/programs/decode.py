"""Decoding fields of packed weights in registers, exactly, two at a time where the device allows it.

A 16-bit word holds fields of 2, 4 or 8 bits, see `kernels.linear.weight_tiles`. Every field becomes a bf16 or f16
number by placing its bits and one multiply-add:

* integers of 2 and 4 bits, stored plus half their range: the bits are put below the exponent of 128 (bf16) or 1024
  (f16), which makes 128 + q, and `operand` = -(128 + half + zero point) is added; every step is exact.
* int8 in bf16, whose seven mantissa bits cannot hold it: (128 + low seven bits) - (128 + sign) is two's complement.
* floats: sign and exponent and mantissa are moved to their places, which gives the number times a power of two
  (subnormals come out right by themselves), and `operand` multiplies that away; it may hold a scale too.

The packed path is inline assembly on pairs of fields, since compilers do not form 32-bit operations from 16-bit ones:
2.3 instructions a weight against 5 or more. The other one is plain Triton, for the interpreter and other vendors.
"""

from __future__ import annotations

import triton
from triton import language as tl


@triton.constexpr_function
def field_assembly(kind: str, bits: int, index: int, is_bf16: bool) -> str:
    """PTX that turns register $1 (two words) and $2 (two operands) into two numbers, $0."""
    name, one = ("bf16x2", "0x3F803F80") if is_bf16 else ("f16x2", "0x3C003C00")
    if kind == "integer":
        body = _integer_bits(bits, index, is_bf16) + f" mov.b32 c, {one}; fma.rn.{name} $0, t, c, $2;"
    else:
        body = _e2m1_bits(index, is_bf16) if kind == "e2m1" else _fp8_bits(kind, index, is_bf16)
        body += f" mov.b32 c, 0x80008000; fma.rn.{name} $0, t, $2, c;"  # plus a negative zero: a product
    return "{ .reg .b32 t, u, c; " + body + " }"


@triton.constexpr_function
def product_assembly(is_bf16: bool) -> str:
    """PTX that multiplies pairs of numbers $1 and $2; plus a negative zero, as bf16 has no product before 9.0."""
    name = "bf16x2" if is_bf16 else "f16x2"
    return "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn." + name + " $0, $1, $2, z; }"


@triton.constexpr_function
def _integer_bits(bits: int, index: int, is_bf16: bool) -> str:
    shift = f"shr.u32 t, $1, {bits * index};"
    if bits == 8 and is_bf16:
        return (
            f"{shift} lop3.b32 u, t, 0x00800080, 0x43004300, 0xEA; lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA;"
            " mov.b32 c, 0xBF80BF80; fma.rn.bf16x2 t, u, c, t;"
        )
    if bits == 8:
        return f"{shift} lop3.b32 t, t, 0x00FF00FF, 0x64806480, 0x6A;"  # (t & mask) ^ magic: 1152 + q
    mask, magic = (1 << bits) - 1, 0x4300 if is_bf16 else 0x6400
    return f"{shift} lop3.b32 t, t, {mask * 0x10001:#x}, {magic * 0x10001:#x}, 0xEA;"


@triton.constexpr_function
def _e2m1_bits(index: int, is_bf16: bool) -> str:
    if index < 3:
        move = f"shl.b32 t, $1, {3 * index}; and.b32 t, t, 0x81C081C0;"
    else:
        move = (
            "shl.b32 t, $1, 1; and.b32 t, t, 0x80008000; shr.u32 u, $1, 5; and.b32 u, u, 0x01000100; or.b32 t, t, u;"
            " shr.u32 u, $1, 4; lop3.b32 t, u, 0x00C000C0, t, 0xEA;"
        )
    if is_bf16:
        return move
    return move + " shl.b32 u, t, 3; and.b32 u, u, 0x0E000E00; lop3.b32 t, t, 0x80008000, u, 0xEA;"


@triton.constexpr_function
def _fp8_bits(kind: str, index: int, is_bf16: bool) -> str:
    # The byte to the upper half of the word: sign in place, exponent and mantissa below it.
    move = f"shl.b32 t, $1, {8 - 8 * index};"
    if kind == "e5m2" and not is_bf16:
        return f"{move} and.b32 t, t, 0xFF00FF00;"
    if kind == "e5m2":
        shift, mask = 3, 0x0FE00FE0
    else:
        shift, mask = (4, 0x07F007F0) if is_bf16 else (1, 0x3F803F80)
    return f"{move} shr.u32 u, t, {shift}; and.b32 u, u, {mask:#x}; lop3.b32 t, t, 0x80008000, u, 0xEA;"


@triton.jit
def field(
    words, operand, INDEX: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, MAGIC: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Field `INDEX` of int16 words as numbers of the operand's dtype, decoded with the operand (same shape)."""
    if PACKED:
        return tl.inline_asm_elementwise(
            field_assembly(KIND, BITS, INDEX, operand.dtype == tl.bfloat16), "=r,r,r", [words, operand],
            dtype=operand.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    bits = words.to(tl.int32)
    if KIND == "integer":
        if BITS == 8:
            numbers = ((bits << (24 - 8 * INDEX)) >> 24).to(tl.float32)
        else:
            numbers = ((bits >> (BITS * INDEX)) & ((1 << BITS) - 1)).to(tl.float32)
        return (numbers + MAGIC + operand.to(tl.float32)).to(operand.dtype)
    if KIND == "e2m1":
        if INDEX < 3:
            moved = (bits << (3 * INDEX)) & 0x81C0
        else:
            moved = ((bits << 1) & 0x8000) | ((bits >> 5) & 0x100) | ((bits >> 4) & 0xC0)
        sign, magnitude = moved & 0x8000, (moved & 0x1C0) >> 6
        MANTISSA: tl.constexpr = 1
    else:
        byte = (bits >> (8 * INDEX)) & 0xFF
        sign, magnitude = (byte & 0x80) << 8, byte & 0x7F
        MANTISSA: tl.constexpr = 3 if KIND == "e4m3" else 2
    # The same bits as a float32, which has bf16's exponents; f16's are fewer by 112.
    numbers = ((sign << 16) | (magnitude << (23 - MANTISSA))).to(tl.float32, bitcast=True)
    if operand.dtype == tl.float16:
        numbers *= 5192296858534827628530496329220096.0  # 2**112
    return (numbers * operand.to(tl.float32)).to(operand.dtype)


@triton.jit
def multiplied(numbers, factors, PACKED: tl.constexpr):
    """Products of numbers of a 16-bit dtype and factors of the same shape, each rounded once."""
    if PACKED:
        return tl.inline_asm_elementwise(
            product_assembly(numbers.dtype == tl.bfloat16), "=r,r,r", [numbers, factors], dtype=numbers.dtype,
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (numbers.to(tl.float32) * factors.to(tl.float32)).to(numbers.dtype)


@triton.jit
def beside(left, right):
    """[R, C] and [R, C] -> [R, 2 * C] without moving a register."""
    both = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(both, (left.shape[0], 2 * left.shape[1]))


@triton.jit
def two_fields(
    words, operand, FIRST: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, MAGIC: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Two consecutive fields side by side."""
    return beside(
        field(words, operand, FIRST, KIND, BITS, MAGIC, PACKED),
        field(words, operand, FIRST + 1, KIND, BITS, MAGIC, PACKED),
    )


@triton.jit
def four_fields(
    words, operand, FIRST: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, MAGIC: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Four consecutive fields side by side."""
    return beside(
        two_fields(words, operand, FIRST, KIND, BITS, MAGIC, PACKED),
        two_fields(words, operand, FIRST + 2, KIND, BITS, MAGIC, PACKED),
    )


@triton.jit
def columns(
    words, operand, FIRST: tl.constexpr, COUNT: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
    MAGIC: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """1, 2, 4 or 8 consecutive fields side by side: [R, C] words -> [R, COUNT * C] numbers."""
    if COUNT == 1:
        return field(words, operand, FIRST, KIND, BITS, MAGIC, PACKED)
    elif COUNT == 2:
        return two_fields(words, operand, FIRST, KIND, BITS, MAGIC, PACKED)
    elif COUNT == 4:
        return four_fields(words, operand, FIRST, KIND, BITS, MAGIC, PACKED)
    else:
        return beside(
            four_fields(words, operand, FIRST, KIND, BITS, MAGIC, PACKED),
            four_fields(words, operand, FIRST + 4, KIND, BITS, MAGIC, PACKED),
        )


@triton.jit
def group_value(words, POSITION: tl.constexpr, BITS: tl.constexpr):
    """The `POSITION`-th value of `BITS` bits in int32 words, unsigned."""
    if BITS == 32:
        return words
    else:
        return (words >> (BITS * POSITION)) & ((1 << BITS) - 1)


@triton.jit
def scale_number(values, KIND: tl.constexpr, e8m0_factor):
    """float32 scales from their bits in int32; E8M0 ones are recoded and come out right times a factor."""
    if KIND == "f32":
        return values.to(tl.float32, bitcast=True)
    if KIND == "bf16":
        return (values << 16).to(tl.float32, bitcast=True)
    if KIND == "f16":
        return values.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (values << 23).to(tl.float32, bitcast=True) * e8m0_factor
