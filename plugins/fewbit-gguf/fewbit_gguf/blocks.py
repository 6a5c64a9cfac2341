"""The block types of GGUF: where each bit of a block lies, as tables, from which unpacking and packing both follow.

A row of a weight is cut into blocks of 32 or 256 consecutive numbers, and a block is one run of bytes that holds the
codes, the scale and, for some types, a minimum. All multi-byte numbers are little-endian.

    number = code * scale                    Q4_0 Q5_0 Q8_0 MXFP4
    number = code * scale + minimum          Q4_1 Q5_1
    number = table[code] * scale             IQ4_NL
    number = code * (c * d)                  Q3_K Q6_K: d of the block, a code c for each group of 16
    number = code * (c * d) - m * dmin       Q2_K Q4_K Q5_K: c and m for each group of 16 or 32

Sources: formats.md section 10 of the house's references, checked against gguf-py 0.19.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fewbit.lazy import torch
from fewbit.numerics import code_dtype
from fewbit.spec.element import E2M1, E8M0, ELEMENTS, F16, Element
from fewbit.spec.granularity import group
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Bits:
    """`width` bits of each of n values: bits `shift[i]`... of byte `byte[i]` are bits `to`... of value i."""

    byte: tuple[int, ...]
    shift: tuple[int, ...]
    width: int
    to: int = 0


@dataclass(frozen=True)
class Field:
    """n codes of a block: their element, their bits, and what is added to a code before it is stored."""

    element: Element
    parts: tuple[Bits, ...]
    offset: int = 0

    @property
    def count(self) -> int:
        return len(self.parts[0].byte)

    def unpack(self, blocks: Tensor) -> Tensor:
        """Codes [..., n], in the dtype of the element's codes, of uint8 blocks [..., bytes]."""
        fields = None
        for part in self.parts:
            bits = blocks.index_select(-1, torch.tensor(part.byte, device=blocks.device))
            if part.width < 8:
                shift = torch.tensor(part.shift, dtype=torch.uint8, device=blocks.device)
                bits = (bits >> shift) & ((1 << part.width) - 1)
            fields = bits << part.to if fields is None else fields | (bits << part.to)
        assert fields is not None
        if code_dtype(self.element) is torch.int8:
            return fields.view(torch.int8) - self.offset
        return fields

    def pack(self, codes: Tensor, blocks: Tensor) -> None:
        """Adds codes [..., n] to uint8 blocks [..., bytes] whose bits for them are zero."""
        fields = (codes + self.offset).to(torch.int8).view(torch.uint8) if codes.dtype is torch.int8 else codes
        for part in self.parts:
            bits = (fields >> part.to) & ((1 << part.width) - 1)
            placed = bits << torch.tensor(part.shift, dtype=torch.uint8, device=blocks.device)
            blocks.index_add_(-1, torch.tensor(part.byte, device=blocks.device), placed)


@dataclass(frozen=True)
class BlockType:
    """One block type.

    Attributes:
        name: GGUF's own.
        elements: numbers in a block.
        nbytes: bytes of a block.
        codes: of the numbers.
        scale: byte at which the multiplier starts.
        scale_element: what the multiplier is stored in.
        minimum: byte at which the float16 minimum starts, if there is one.
        scale_codes: what each group multiplies the scale by, if groups do.
        minimum_codes: what each group multiplies the minimum by; the product is then subtracted.
        codebook: the number that each code stands for, where codes are indices.
    """

    name: str
    elements: int
    nbytes: int
    codes: Field
    scale: int
    scale_element: Element = F16
    minimum: int | None = None
    scale_codes: Field | None = None
    minimum_codes: Field | None = None
    codebook: tuple[int, ...] = ()

    @cached_property
    def key(self) -> LinearKey:
        """The key of a layer that is stored so. A minimum and a codebook are roles of the record, not of the key."""
        element = self.scale_codes.element if self.scale_codes else self.scale_element
        groups = self.scale_codes.count if self.scale_codes else 1
        return LinearKey(QuantKey(self.codes.element, ScaleSpec(element, group(self.elements // groups))))

    @cached_property
    def roles(self) -> frozenset[str]:
        """Roles of a record."""
        extras = {"minimum"} if self.minimum is not None else set()
        return frozenset({"codes", "scale"} | extras | ({"codebook"} if self.codebook else set()))

    def floats(self, blocks: Tensor, start: int, element: Element = F16) -> Tensor:
        """The numbers [...] that start at a byte of each block [..., bytes]; E8M0 as the bytes they are."""
        if element == E8M0:
            return blocks[..., start].contiguous()
        return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def put_floats(blocks: Tensor, start: int, numbers: Tensor) -> None:
    """Writes numbers [...] into blocks [..., bytes], the inverse of `BlockType.floats`."""
    raw = numbers.contiguous().unsqueeze(-1).view(torch.uint8)
    blocks[..., start : start + raw.shape[-1]] = raw


def _bits(
    count: int, byte: Callable[[int], int], shift: Callable[[int], int] | int = 0, width: int = 8, to: int = 0
) -> Bits:
    shifts = (shift,) * count if isinstance(shift, int) else tuple(map(shift, range(count)))
    return Bits(tuple(map(byte, range(count))), shifts, width, to)


def _halves(start: int) -> Bits:
    """32 nibbles: numbers 0..15 in the low halves of 16 bytes, 16..31 in the high ones."""
    return _bits(32, lambda i: start + i % 16, lambda i: 4 * (i // 16), 4)


def _fifth(start: int) -> Bits:
    """Bit 4 of 32 numbers, one bit each in order."""
    return _bits(32, lambda i: start + i // 8, lambda i: i % 8, 1, to=4)


def _crumbs(start: int) -> Bits:
    """256 times two bits: 32 bytes hold four runs of 32 numbers, lowest bits first."""
    return _bits(256, lambda i: start + 32 * (i // 128) + i % 32, lambda i: 2 * (i % 128 // 32), 2)


def _nibbles(start: int) -> Bits:
    """256 nibbles: 32 bytes hold two runs of 32 numbers, low halves first."""
    return _bits(256, lambda i: start + 32 * (i // 64) + i % 32, lambda i: 4 * (i // 32 % 2), 4)


def _one_bit(start: int, to: int) -> Bits:
    """One bit of 256 numbers: bit j of 32 bytes belongs to run j of 32 numbers."""
    return _bits(256, lambda i: start + i % 32, lambda i: i // 32, 1, to=to)


# Twelve bytes hold eight 6-bit scales and eight 6-bit minima: the first four of each whole, in the low six bits of
# bytes 0..3 and 4..7; of the last four the low halves share bytes 8..11, and the two high bits fill up bytes 0..7.
def _six_bit(start: int, whole: int, half: int) -> tuple[Bits, ...]:
    low = _bits(8, lambda j: start + (whole + j if j < 4 else 4 + j), lambda j: 0 if j < 4 else half, 4)
    high = _bits(8, lambda j: start + whole + j % 4, lambda j: 4 if j < 4 else 6, 2, to=4)
    return low, high


_SCALES_OF_32 = Field(ELEMENTS["uint6"], _six_bit(4, 0, 0))
_MINIMA_OF_32 = Field(ELEMENTS["uint6"], _six_bit(4, 4, 4))
_SCALES_OF_Q3_K = Field(
    ELEMENTS["int6"],
    (
        _bits(16, lambda j: 96 + j % 8, lambda j: 4 * (j // 8), 4),
        _bits(16, lambda j: 104 + j % 4, lambda j: 2 * (j // 4), 2, to=4),
    ),
    offset=32,
)
_Q6_K_LOW = _bits(256, lambda i: 64 * (i // 128) + i % 64, lambda i: 4 * (i % 128 // 64), 4)
_Q6_K_HIGH = _bits(256, lambda i: 128 + 32 * (i // 128) + i % 32, lambda i: 2 * (i % 128 // 32), 2, to=4)
_IQ4_NL_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_ALL = (
    BlockType("Q4_0", 32, 18, Field(ELEMENTS["int4"], (_halves(2),), 8), 0),
    BlockType("Q4_1", 32, 20, Field(ELEMENTS["uint4"], (_halves(4),)), 0, minimum=2),
    BlockType("Q5_0", 32, 22, Field(ELEMENTS["int5"], (_halves(6), _fifth(2)), 16), 0),
    BlockType("Q5_1", 32, 24, Field(ELEMENTS["uint5"], (_halves(8), _fifth(4))), 0, minimum=2),
    BlockType("Q8_0", 32, 34, Field(ELEMENTS["int8"], (_bits(32, lambda i: 2 + i),)), 0),
    BlockType("IQ4_NL", 32, 18, Field(ELEMENTS["uint4"], (_halves(2),)), 0, codebook=_IQ4_NL_TABLE),
    BlockType("MXFP4", 32, 17, Field(E2M1, (_halves(1),)), 0, E8M0),
    BlockType(
        "Q2_K", 256, 84, Field(ELEMENTS["uint2"], (_crumbs(16),)), 80, minimum=82,
        scale_codes=Field(ELEMENTS["uint4"], (_bits(16, lambda j: j, width=4),)),
        minimum_codes=Field(ELEMENTS["uint4"], (_bits(16, lambda j: j, 4, 4),)),
    ),
    BlockType(
        "Q3_K", 256, 110, Field(ELEMENTS["int3"], (_crumbs(32), _one_bit(0, 2)), 4), 108, scale_codes=_SCALES_OF_Q3_K
    ),
    BlockType(
        "Q4_K", 256, 144, Field(ELEMENTS["uint4"], (_nibbles(16),)), 0, minimum=2,
        scale_codes=_SCALES_OF_32, minimum_codes=_MINIMA_OF_32,
    ),
    BlockType(
        "Q5_K", 256, 176, Field(ELEMENTS["uint5"], (_nibbles(48), _one_bit(16, 4))), 0, minimum=2,
        scale_codes=_SCALES_OF_32, minimum_codes=_MINIMA_OF_32,
    ),
    BlockType(
        "Q6_K", 256, 210, Field(ELEMENTS["int6"], (_Q6_K_LOW, _Q6_K_HIGH), 32), 208,
        scale_codes=Field(ELEMENTS["int8"], (_bits(16, lambda j: 192 + j),)),
    ),
)  # fmt: skip

BLOCK_TYPES: dict[str, BlockType] = {one.name: one for one in _ALL}
"""Every block type that is read and written, by GGUF's name of it."""
