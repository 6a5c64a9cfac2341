"""Pairs of 4-bit codes in a byte to 8-bit operands of the tensor cores, in registers, exactly up to a power of two.

The code in the upper half of byte c belongs to the second run of input features, the one in the lower half to the
first. What bytes become is a number times a power of two, which scales of rows take away (`linear.product_layout`):

* integers to int8: the four bits are put into the upper half of a byte, which is sixteen times the integer.
* integers to E4M3: magnitudes 0 to 8 are subnormal or the smallest normal numbers of E4M3 as they are, 2**-9 each.
  They are stored as a sign and three bits; a sign alone means -8.
* E2M1 to E4M3: four magnitudes at a time are looked up by a permutation of bytes, 2**6 times the number, whose exponent
  a byte of offsets may lower: a group's scale where it is a power of two (`e2m1_runs`).

The packed path is assembly on four bytes at a time, since compilers form no 32-bit operations from 8-bit ones.
"""

from __future__ import annotations

import triton
from triton import language as tl


@triton.constexpr_function
def nibble_assembly(operand: str) -> str:
    """PTX that turns register $2 (four bytes) into the first runs' operands, $0, and the second runs', $1."""
    if operand == "int8":
        return "{ .reg .b32 t; and.b32 $1, $2, 0xF0F0F0F0; shl.b32 t, $2, 4; and.b32 $0, t, 0xF0F0F0F0; }"
    return "{ .reg .b32 t, u, s, m; " + _integer("$1", "$2") + " shl.b32 t, $2, 4; " + _integer("$0", "t") + " }"


@triton.constexpr_function
def _integer(to: str, taken: str) -> str:
    # Bit 3 of the byte is set where the sign is and magnitude + 7 does not reach it: the magnitude is zero.
    return (
        f"and.b32 s, {taken}, 0x80808080; shr.u32 u, {taken}, 4; and.b32 m, u, 0x07070707; or.b32 s, s, m;"
        f" and.b32 u, u, 0x08080808; add.u32 m, m, 0x07070707; lop3.b32 {to}, u, m, s, 0xBA;"
    )


@triton.jit
def operand_of(codes, OPERAND: tl.constexpr):
    """Integers of 4 bits in int32 to int8 bytes; what the packed path does, in plain operations."""
    if OPERAND == "int8":
        byte = codes << 4
    else:
        byte = ((codes & 8) << 4) | tl.where(codes == 8, 8, codes & 7)
    return byte.to(tl.int8)


@triton.jit
def both_runs(words, KIND: tl.constexpr, OPERAND: tl.constexpr, PACKED: tl.constexpr):
    """int8 bytes of two codes to the operands of the first and of the second run, int8 of the same shape."""
    if KIND == "e2m1":
        return e2m1_runs(words, tl.zeros_like(words).to(tl.int32), tl.zeros_like(words).to(tl.int32), 0, 0, PACKED)
    elif PACKED:
        return tl.inline_asm_elementwise(
            nibble_assembly(OPERAND), "=r,=r,r", [words], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        codes = words.to(tl.int32)
        return operand_of(codes & 15, OPERAND), operand_of((codes >> 4) & 15, OPERAND)


@triton.constexpr_function
def e2m1_assembly(first: int, second: int) -> str:
    """PTX that turns four bytes $2 into operands $0 and $1 of both runs, offsets in bytes of $3 and of $7.

    The tables hold 0, 32, 64, 96 and 128, 192, 256, 384 in E4M3; zero has no exponent to lower.
    """

    def run(to: str, offsets: str, byte: int, signs: str) -> str:
        return (
            f"prmt.b32 a, {offsets}, 0, {0x1111 * byte:#x}; and.b32 b, a, 0xFFFFFF00; sub.u32 b, 0x6C686000, b;"
            f" sub.u32 a, 0x7C787470, a; prmt.b32 a, b, a, m; lop3.b32 {to}, {signs}, 0x80808080, a, 0xEA;"
        )

    return (
        "{ .reg .b32 m, a, b, s; and.b32 m, $2, 0x77777777; " + run("$0", "$3", first, "$2")
        + " shr.u32 m, m, 16; shl.b32 s, $2, 4; " + run("$1", "$7", second, "s") + " }"
    )  # fmt: skip


@triton.jit
def fours(words):
    """int32 [R, C / 4] of int8 [R, C], the first of four bytes lowest."""
    ROWS: tl.constexpr = words.numel // words.shape[-1]
    even, odd = tl.split(tl.reshape(words.to(tl.int32) & 255, (ROWS, words.shape[-1] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first | (second << 8) | (third << 16) | (fourth << 24)


@triton.jit
def e2m1_byte(word, offsets, RUN: tl.constexpr, PLACE: tl.constexpr):
    """The operand of code `PLACE` of a run in words of four, int32."""
    magnitude = (word >> (16 * RUN + 4 * PLACE)) & 7
    sign = (word >> (8 * PLACE + 7 - 4 * RUN)) & 1
    TABLE: tl.constexpr = 0x6C686000 + (0x7C787470 << 32)
    value = ((TABLE >> (8 * magnitude.to(tl.int64))) & 255).to(tl.int32)
    return (sign << 7) | tl.where(magnitude > 0, value - offsets, 0)


@triton.jit
def e2m1_run(words, offsets, RUN: tl.constexpr, BYTE: tl.constexpr):
    """What the packed path does for one run, in plain operations; `offsets` is one word for each four bytes."""
    word = fours(words)
    even, odd = tl.split(tl.reshape((offsets >> (8 * BYTE)) & 255, (word.shape[0], word.shape[1], 2, 2)))
    offset, rest = tl.split(even)
    low = tl.join(e2m1_byte(word, offset, RUN, 0), e2m1_byte(word, offset, RUN, 2))
    high = tl.join(e2m1_byte(word, offset, RUN, 1), e2m1_byte(word, offset, RUN, 3))
    return tl.reshape(tl.join(low, high), words.shape).to(tl.int8)


@triton.jit
def e2m1_runs(words, first_offsets, second_offsets, FIRST: tl.constexpr, SECOND: tl.constexpr, PACKED: tl.constexpr):
    """int8 bytes of E2M1 codes in fours (`linear.product_layout`) to operands of both runs, int8 of the same shape.

    Args:
        first_offsets, second_offsets: int32 of the same shape; eight times what exponents of four codes are lowered by
            is in byte `FIRST` for the first and in byte `SECOND` for the second run.
    """
    if PACKED:
        return tl.inline_asm_elementwise(
            e2m1_assembly(FIRST, SECOND), "=r,=r,r,r,r,r,r,r,r,r,r", [words, first_offsets, second_offsets],
            dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return e2m1_run(words, first_offsets, 0, FIRST), e2m1_run(words, second_offsets, 1, SECOND)
