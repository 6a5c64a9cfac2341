"""Pairs of 4-bit codes in a byte to 8-bit operands of the tensor cores, in registers, exactly up to a power of two.

How codes lie in bytes and in words of four bytes, `linear.product_layout` says. What bytes become is a number times a
power of two, which scales of rows take away:

* integers to int8: the four bits are put into the upper half of a byte, which is sixteen times the integer.
* integers to E4M3: permutations of bytes look four up at a time, once among the numbers from 0 and once among those
  below, and their signs choose.
* E2M1 to E4M3: four magnitudes at a time are looked up, 2**6 times the number, whose exponent a byte of offsets may
  lower: a group's scale where it is a power of two.

The packed path is assembly on four bytes at a time, since compilers form no 32-bit operations from 8-bit ones.
"""

from __future__ import annotations

import triton
from triton import language as tl

_INT8 = "{ .reg .b32 t; and.b32 $1, $2, 0xF0F0F0F0; shl.b32 t, $2, 4; and.b32 $0, t, 0xF0F0F0F0; }"


@triton.constexpr_function
def integer_assembly(operand: str) -> str:
    """PTX that turns register $2 (four bytes) into the first runs' operands, $0, and the second runs', $1."""
    if operand == "int8":
        return _INT8

    def run(to: str, signs: str) -> str:
        return (
            "prmt.b32 p, 0x44403800, 0x4E4C4A48, m; prmt.b32 n, 0xCACCCED0, 0xB8C0C4C8, m;"
            f" prmt.b32 s, {signs}, 0, 0xBA98; lop3.b32 {to}, p, n, s, 0xD8;"
        )

    return (
        "{ .reg .b32 m, p, n, s, t; and.b32 m, $2, 0x77777777; " + run("$0", "$2")
        + " shr.u32 m, m, 16; shl.b32 t, $2, 4; " + run("$1", "t") + " }"
    )  # fmt: skip


@triton.constexpr_function
def e2m1_assembly(first: int, second: int) -> str:
    """The same of E2M1, with offsets in byte `first` of $3 and byte `second` of $7.

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
def both_runs(words, KIND: tl.constexpr, OPERAND: tl.constexpr, PACKED: tl.constexpr):
    """int8 bytes of two codes to the operands of the first and of the second run, int8 of the same shape."""
    if KIND == "e2m1":
        offsets = tl.zeros_like(words).to(tl.int32)
        return e2m1_runs(words, offsets, offsets, 0, 0, PACKED)
    elif PACKED:
        return tl.inline_asm_elementwise(
            integer_assembly(OPERAND), "=r,=r,r", [words], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    elif OPERAND == "int8":
        codes = words.to(tl.int32)
        return (codes << 4).to(tl.int8), (codes & 0xF0).to(tl.int8)
    else:
        return plain_run(words, tl.zeros_like(words).to(tl.int32), 0, 0, KIND), plain_run(
            words, tl.zeros_like(words).to(tl.int32), 1, 0, KIND
        )


@triton.jit
def e2m1_runs(words, first_offsets, second_offsets, FIRST: tl.constexpr, SECOND: tl.constexpr, PACKED: tl.constexpr):
    """int8 bytes of E2M1 codes in fours to operands of both runs, int8 of the same shape.

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
        return plain_run(words, first_offsets, 0, FIRST, "e2m1"), plain_run(words, second_offsets, 1, SECOND, "e2m1")


@triton.jit
def plain_run(words, offsets, RUN: tl.constexpr, BYTE: tl.constexpr, KIND: tl.constexpr):
    """What the packed path does for one run of codes in fours, in plain operations."""
    FOURS: tl.constexpr = words.shape[-1] // 4
    ROWS: tl.constexpr = words.numel // words.shape[-1]
    even, odd = tl.split(tl.reshape(words.to(tl.int32) & 255, (ROWS, FOURS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    word = first | (second << 8) | (third << 16) | (fourth << 24)
    offset = tl.max(tl.reshape((offsets >> (8 * BYTE)) & 255, (ROWS, FOURS, 4)), axis=2)  # the same for all four
    low = tl.join(plain_byte(word, offset, RUN, 0, KIND), plain_byte(word, offset, RUN, 2, KIND))
    high = tl.join(plain_byte(word, offset, RUN, 1, KIND), plain_byte(word, offset, RUN, 3, KIND))
    return tl.reshape(tl.join(low, high), words.shape).to(tl.int8)


@triton.jit
def plain_byte(word, offset, RUN: tl.constexpr, PLACE: tl.constexpr, KIND: tl.constexpr):
    """The operand of code `PLACE` of a run in words of four, int32."""
    lower = (word >> (16 * RUN + 4 * PLACE)) & 7
    sign = (word >> (8 * PLACE + 7 - 4 * RUN)) & 1
    if KIND == "e2m1":
        magnitudes = tl.full(lower.shape, 0x7C7874706C686000, tl.int64)
        byte = ((magnitudes >> (8 * lower.to(tl.int64))) & 255).to(tl.int32) - offset
        return (sign << 7) | tl.where(lower > 0, byte, 0)
    else:
        magnitudes = tl.full(lower.shape, 0x4E4C4A4844403800, tl.int64)
        size = tl.where(sign > 0, 8 - lower, lower)
        byte = ((magnitudes >> (8 * (size & 7).to(tl.int64))) & 255).to(tl.int32)
        return (sign << 7) | tl.where(size == 8, 0x50, byte)
