"""Dense n-bit words: codes of a run end to end in a little-endian bit string cut into words.

Code i of a run along `layout.axis` occupies bits [i * bits, (i + 1) * bits) of the string; word 0 holds the first
`word_bits` bits, lowest first, and a code may straddle two words. The last word of a run is padded with zero bits.

This one layout is GPTQ's (int32 along K of a transposed weight), AutoRound's, compressed-tensors' pack-quantized (int32
along K, codes plus 2**(bits-1)) and its zero points (along N), Humming's, the FP4 pairs of NVFP4 and MXFP4 (uint8, low
nibble first) and MXFP6's four codes in three bytes. Sources: formats.md sections 0, 3 and 11; compressed-tensors
0.20.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fewbit.errors import ShapeError
from fewbit.packing import fields
from fewbit.packing.interface import Packing
from fewbit.spec.element import Element
from fewbit.spec.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS = (8, 32)


class Dense(Packing):
    """See the head of this file."""

    name: ClassVar[str] = "dense"

    def packed_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        if layout.word_bits not in WORD_BITS or not 1 <= layout.bits <= 8:
            raise ShapeError(
                f"There are no dense words of {layout.word_bits} bits that hold codes of {layout.bits} bits.",
                f"Use 1 to 8 bits in words of {' or '.join(map(str, WORD_BITS))}.",
            )
        words = -(-fields.extent_along(shape, layout) * layout.bits // layout.word_bits)
        return fields.shape_with(words, shape, layout)

    def pack(self, codes: Tensor, layout: Layout) -> Tensor:
        return fields.stored(fields.words_of(fields.fields_of(codes, layout), layout.bits, layout.word_bits), layout)

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        count = fields.extent_along(shape, layout)
        found = fields.fields_in(fields.raw(words, layout), layout.bits, layout.word_bits, count)
        return fields.codes_of(found, layout, element)
