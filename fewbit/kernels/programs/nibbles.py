"""Pairs of 4-bit codes in a byte to 8-bit operands of the tensor cores, in registers, exactly up to a power of two.

The code in the upper half of byte c belongs to the second run of input features, the one in the lower half to the
first. What bytes become is a number times a power of two, which scales of rows take away (`linear.product_layout`):

* integers to int8: the four bits are put into the upper half of a byte, which is sixteen times the integer.
* integers to E4M3: magnitudes 0 to 8 are subnormal or the smallest normal numbers of E4M3 as they are, 2**-9 each.
  They are stored as a sign and three bits; a sign alone means -8.
* E2M1 to E4M3: exponent and mantissa move to their places, 2**-6 times the number.

The packed path is assembly on four bytes at a time, since compilers form no 32-bit operations from 8-bit ones.
"""

from __future__ import annotations

import triton
from triton import language as tl


@triton.constexpr_function
def nibble_assembly(kind: str, operand: str) -> str:
    """PTX that turns register $2 (four bytes) into the first runs' operands, $0, and the second runs', $1."""
    if operand == "int8":
        return "{ .reg .b32 t; and.b32 $1, $2, 0xF0F0F0F0; shl.b32 t, $2, 4; and.b32 $0, t, 0xF0F0F0F0; }"
    body = _e2m1 if kind == "e2m1" else _integer
    return "{ .reg .b32 t, u, s, m; " + body("$1", "$2") + " shl.b32 t, $2, 4; " + body("$0", "t") + " }"


@triton.constexpr_function
def _e2m1(to: str, taken: str) -> str:
    return f"and.b32 s, {taken}, 0x80808080; shr.u32 u, {taken}, 2; lop3.b32 {to}, u, 0x1C1C1C1C, s, 0xEA;"


@triton.constexpr_function
def _integer(to: str, taken: str) -> str:
    # Bit 3 of the byte is set where the sign is and magnitude + 7 does not reach it: the magnitude is zero.
    return (
        f"and.b32 s, {taken}, 0x80808080; shr.u32 u, {taken}, 4; and.b32 m, u, 0x07070707; or.b32 s, s, m;"
        f" and.b32 u, u, 0x08080808; add.u32 m, m, 0x07070707; lop3.b32 {to}, u, m, s, 0xBA;"
    )


@triton.jit
def operand_of(codes, KIND: tl.constexpr, OPERAND: tl.constexpr):
    """int32 codes of 4 bits to int8 bytes; what the packed path does, in plain operations."""
    if OPERAND == "int8":
        byte = codes << 4
    elif KIND == "e2m1":
        byte = ((codes & 8) << 4) | ((codes & 7) << 2)
    else:
        byte = ((codes & 8) << 4) | tl.where(codes == 8, 8, codes & 7)
    return byte.to(tl.int8)


@triton.jit
def both_runs(words, KIND: tl.constexpr, OPERAND: tl.constexpr, PACKED: tl.constexpr):
    """int8 bytes of two codes to the operands of the first and of the second run, int8 of the same shape."""
    if PACKED:
        return tl.inline_asm_elementwise(
            nibble_assembly(KIND, OPERAND), "=r,=r,r", [words], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        codes = words.to(tl.int32)
        return operand_of(codes & 15, KIND, OPERAND), operand_of((codes >> 4) & 15, KIND, OPERAND)
